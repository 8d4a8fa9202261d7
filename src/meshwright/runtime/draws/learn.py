"""Which dim of each draw holds the samples: a copy of the module without memory is run on two samples and on three.

size with 2     size with 3     the draw is
[2, S, H]       [3, S, H]       of samples, in dim 0
[S, 2, H]       [S, 3, H]       of samples, in dim 1
[1, S, H]       [1, S, H]       the same for all samples
[2 S, H]        [3 S, H]        refused: whether a sample's rows lie together cannot be seen from sizes
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from meshwright.core.errors import MeshwrightError, ModelError
from meshwright.models.faked.unchanged import unchanged
from meshwright.models.fakes import no_log_of_fakes
from meshwright.models.location import line_of
from meshwright.models.objective import Batch, call, map_batch
from meshwright.models.own_recompute import own_recompute_left_out
from meshwright.models.seeded import seeded
from meshwright.models.sketch import Sketch
from meshwright.runtime.draws.mode import Along, Learner, Size
from meshwright.runtime.draws.sites import Site

FEW, MORE = 2, 3


def learn(sketch: Sketch, batch: Batch) -> dict[Site, Along]:
    """batch: any number of samples; the first is repeated."""
    few, more = (_sizes(sketch, map_batch(_repeated(number), batch)) for number in (FEW, MORE))
    if few.keys() != more.keys():
        site = next(iter(few.keys() ^ more.keys()))
        raise ModelError(
            f"random numbers by sample: {site} draws as often as there are samples, so that a draw is of no one of them: draw for "
            "all samples at once, or set random to 'rank'"
        )
    return {site: _along(site, size, more[site]) for site, size in few.items()}


def check_modules(module: nn.Module) -> None:
    """What draws inside a kernel is not seen by any mode."""
    for name, part in module.named_modules():
        if isinstance(part, nn.RNNBase) and part.dropout > 0:
            raise ModelError(
                f"random numbers by sample: module '{name}' ({type(part).__name__}) drops inside its kernel: set its dropout to 0 "
                "and put nn.Dropout between layers of its own, or set random to 'rank'"
            )


def _repeated(number: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.cat([tensor[:1]] * number)


def _sizes(sketch: Sketch, batch: Batch) -> dict[Site, Size]:
    learner = Learner(sketch.module, sketch.fakes)
    quiet = (no_log_of_fakes(), unchanged(sketch.module), own_recompute_left_out(), seeded(0))
    with quiet[0], quiet[1], quiet[2], quiet[3], torch.no_grad(), sketch.computing(), learner:
        try:
            call(sketch.module, batch)
        except MeshwrightError:
            raise
        except Exception as error:  # the model's own code
            raise ModelError(
                "random numbers by sample: the model is followed once on tensors without values, to learn what it draws, and its "
                f"code fails there: {type(error).__name__}: {' '.join(str(error).split())} ({line_of(error)}); set random to 'rank'"
            ) from error
    return learner.sizes


def _along(site: Site, few: Size, more: Size) -> Along:
    grown = [dim for dim, (one, other) in enumerate(zip(few, more, strict=False)) if one != other]
    if len(few) == len(more) and not grown:
        return None
    if len(few) == len(more) and len(grown) == 1 and (few[grown[0]], more[grown[0]]) == (FEW, MORE):
        return grown[0]
    raise ModelError(
        f"random numbers by sample: {site} draws a tensor of {list(few)} for {FEW} samples and of {list(more)} for {MORE}: no dim "
        "of it is the samples, so that nobody can say which numbers are whose; draw before samples and places are in one dim, or "
        "set random to 'rank'"
    )
