"""What cannot be cut into stages is refused when the plan is made, before a rank starts, with the line that is in the way."""

from __future__ import annotations

import pytest
from cases import ROOT

from meshwright.core.request import PlanRequest
from meshwright.measure.checking.check import _made_small
from meshwright.measure.cutting import CannotCutError
from meshwright.models.source import resolve
from meshwright.planner.parity import plain_plan_of_small

SURVEY = ROOT / "tests" / "survey"
REFUSED = {
    f"{SURVEY}/habits/state.py:codebook": r"reads buffer 'codebook.codes', and writes it .* \(add_, state\.py:\d+\)",
    f"{SURVEY}/habits/state.py:ema_teacher": r"writes parameter 'teacher.stem.weight' \(mul_\)",
    f"{SURVEY}/by_hand/encoders.py:conditional_depth": r"a value of what block 'embed' made \(__bool__, encoders\.py:\d+\)",
    f"hf:{SURVEY}/seq2seq/switch_transformers.json": r"its code fails: .* \(modeling_switch_transformers\.py:\d+\); set pp to 1",
}


@pytest.mark.filterwarnings("ignore::meshwright.core.errors.GuessWarning")
@pytest.mark.parametrize("model", REFUSED)
def test_it_is_refused_when_the_plan_is_made(model: str) -> None:
    with pytest.raises(CannotCutError, match=REFUSED[model]):
        plain_plan_of_small(model, PlanRequest(pp=2), 2)


def test_the_check_before_a_run_refuses_it_too() -> None:
    """Where a small copy has no such plan for other reasons, the run begins unchecked."""
    source = resolve(f"{SURVEY}/habits/state.py:codebook").small()
    with pytest.raises(CannotCutError):
        _made_small(source, PlanRequest(pp=2), 2, None)  # type: ignore[arg-type]


def test_what_can_be_cut_is_planned() -> None:
    assert plain_plan_of_small(f"{SURVEY}/habits/state.py:buffers_in_forward", PlanRequest(pp=2), 2).mesh.pp == 2
