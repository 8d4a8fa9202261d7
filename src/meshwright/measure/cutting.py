"""Whether a model can be cut into a plan's stages, tried in one process as every rank does it: what cannot be is refused before
ranks start."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.core.errors import MeshwrightError, PlanError
from meshwright.core.plan import Plan
from meshwright.measure.exact import exact, widened, widened_batch
from meshwright.measure.silence import silence, silence_modules
from meshwright.models.source import ModelSource
from meshwright.runtime.pipeline.cut import stage_of_blocks
from meshwright.runtime.pipeline.draw import draw
from meshwright.runtime.pipeline.wiring import lay_out


class CannotCutError(PlanError):
    """The model's code does not let itself be cut where the plan's stages meet."""


def check_stages(source: ModelSource, plan: Plan) -> None:
    """source: small. In float64, and without randomness, as `parity` runs it."""
    if plan.mesh.pp == 1 or source.example is None:
        return
    module = widened(source.build())
    silence_modules(module)
    try:
        with exact(), silence():
            _lay_out(module, source, plan)
    except MeshwrightError as error:
        raise CannotCutError(str(error)) from error
    except Exception:  # whatever else there is, ranks meet it where it can be named
        return


def _lay_out(module: nn.Module, source: ModelSource, plan: Plan) -> None:
    assert source.example is not None
    sketch = draw(module, plan, torch.device("cpu"))
    steps = sketch.follow(widened_batch(source.example(plan.microbatch)), source.objective)
    lay_out(steps, stage_of_blocks(plan), len(plan.stages), "")
