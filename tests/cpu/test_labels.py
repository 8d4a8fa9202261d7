"""Who answers the labels: the default loss, the model's own, or nobody, which is refused."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import ASSETS
from pool import RankPool, this_rank
from torch import Tensor, nn

import meshwright as mw
from meshwright.capturing.capture import capture_source
from meshwright.core.errors import ModelError
from meshwright.core.request import PlanRequest
from meshwright.measure.mean_loss import find_in_source
from meshwright.measure.parity import ParityResult, compare
from meshwright.models.labels import LABELS, SHIFTED, TAKEN, own_loss, who_answers
from meshwright.models.objective import DEFAULT, answered, default_count, default_loss
from meshwright.models.source import resolve
from meshwright.rules.plain_plan import plain_plan

Pools = Callable[[int], RankPool]
FILE = f"{ASSETS}/own_losses.py"


class Taking(nn.Module):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return input_ids


class Plain(nn.Module):
    def forward(self, input_ids: Tensor) -> Tensor:
        return input_ids


IDS = torch.randint(9, (3, 6), generator=torch.Generator().manual_seed(0))
PADDED = IDS.masked_fill(torch.arange(6)[None] > 3, -100)
FOLLOWING = IDS.roll(-1, 1)
ONES = torch.ones(3, 6, dtype=torch.long)


@pytest.mark.parametrize(
    ("module", "batch", "expected"),
    [
        (Plain(), {"input_ids": IDS, "labels": FOLLOWING}, LABELS),
        (Taking(), {"input_ids": IDS, "labels": FOLLOWING}, TAKEN),
        (Taking(), {"input_ids": IDS, "labels": IDS.float()}, TAKEN),
        (Taking(), {"input_ids": IDS, "labels": IDS}, SHIFTED),
        (Taking(), {"input_ids": IDS, "labels": PADDED}, SHIFTED),
        (Taking(), {"input_ids": ONES, "labels": ONES}, TAKEN),  # shifted or not: nobody can tell
        (Taking(), {"input_ids": IDS, "attention_mask": ONES, "labels": ONES}, TAKEN),
        (Taking(), {"input_ids": IDS, "labels": IDS * 0 - 100}, TAKEN),
        (Plain(), {"input_ids": IDS.float(), "labels": IDS.float()}, LABELS),  # an autoencoder's
        (Plain(), {"input_ids": IDS[:, 0], "labels": IDS[:, 0]}, LABELS),
        (Plain(), (IDS, FOLLOWING), LABELS),
        (Plain(), IDS, LABELS),
    ],
)
def test_who_answers(module: nn.Module, batch: Any, expected: str) -> None:
    assert who_answers(module, batch) == expected


def test_models_of_transformers_keep_their_convention() -> None:
    """Labels that follow the inputs would be shifted again inside, in a model and in whatever holds one."""
    module, batch = runpy.run_path(FILE)["collated"]()
    holder = Taking()
    holder.model = module
    shifted = {"input_ids": batch["input_ids"], "labels": batch["input_ids"].roll(-1, 1)}
    assert [who_answers(one, shifted) for one in (module, holder)] == [LABELS, LABELS]


def test_a_model_that_takes_labels_may_leave_the_loss_to_others() -> None:
    logits, labels = torch.randn(3, 6, 9), FOLLOWING
    given, taken = ({"input_ids": IDS, name: labels} for name in (LABELS, TAKEN))
    assert default_loss(logits, taken) == default_loss(logits, given)


@pytest.mark.parametrize("batch", [{"input_ids": IDS, "labels": PADDED}, (IDS, IDS)], ids=["dict", "pair"])
def test_labels_that_nobody_shifts_are_refused(batch: Any) -> None:
    with pytest.raises(ModelError, match=r"equal to .*tokens\[:, 1:\] as labels"):
        answered(Plain(), batch, DEFAULT)


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"input_ids": IDS, "labels": PADDED}, 12),
        ({"input_ids": IDS, SHIFTED: PADDED}, 9),
        ({"input_ids": IDS, TAKEN: PADDED}, 12),
        ({"idx": IDS, "targets": IDS.masked_fill(IDS > 4, -1)}, int((IDS <= 4).sum())),
        ({"idx": IDS}, 3),
        ({"x": IDS.float(), "targets": IDS.float()}, 3),
    ],
)
def test_what_a_mean_counts(batch: Any, count: int) -> None:
    assert default_count(batch) == count


LOSS = torch.tensor(2.0)
TARGETS = {"idx": IDS, "targets": IDS}


@pytest.mark.parametrize(
    ("output", "batch", "is_found"),
    [
        (LOSS, IDS, True),
        ({"loss": LOSS, "logits": IDS}, IDS, True),
        ((IDS, LOSS), TARGETS, True),
        ((IDS, LOSS), {"idx": IDS}, False),  # may be an auxiliary loss alone
        ((LOSS, LOSS), TARGETS, False),
        ({"loss": None, "logits": IDS}, IDS, False),
        ({"loss_box": LOSS, "loss_class": LOSS}, IDS, False),
        (torch.ones(3, 4), IDS, False),
        ((torch.ones(3, 4), None), TARGETS, False),
    ],
)
def test_what_is_taken_for_a_loss(output: Any, batch: Any, is_found: bool) -> None:
    assert (own_loss(output, batch) is LOSS) == is_found
    if not is_found:
        with pytest.raises(ModelError, match="nobody gave a loss"):
            default_loss(output, batch)


@pytest.mark.parametrize("form", [dict, tuple])
def test_a_term_that_the_default_loss_would_leave_out_is_refused(form: type) -> None:
    logits, term = torch.randn(3, 6, 9), torch.ones((), requires_grad=True) * 2

    def returned(number: Tensor) -> Any:
        named = {"logits": logits, "balance": number}
        return named if form is dict else tuple(named.values())

    with pytest.raises(ModelError, match="would leave it out"):
        default_loss(returned(term), {"labels": FOLLOWING})
    assert default_loss(returned(term.detach()), {"labels": FOLLOWING}) == default_loss(logits, {"labels": FOLLOWING})


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        (torch.ones(4, 1), torch.ones(4)),
        (torch.ones(2, 5, 7, 5), torch.zeros(2, 7, 5, dtype=torch.long)),
        (torch.ones(4, 1, 9), torch.zeros(4, 6, dtype=torch.long)),
    ],
    ids=["broadcast", "classes in dim 1", "last token alone"],
)
def test_labels_that_do_not_fit_are_refused(logits: Tensor, labels: Tensor) -> None:
    with pytest.raises(ModelError, match="do not fit what the model returned"):
        default_loss(logits, {"labels": labels})


@pytest.mark.parametrize(
    ("function", "said"),
    [("nano_without_targets", "nobody gave a loss"), ("nano_pair", "do not fit"), ("copies", "nothing shifts them")],
)
def test_capture_refuses(function: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        capture_source(resolve(f"{FILE}:{function}"))


def test_capture_in_python_uses_the_models_own_loss() -> None:
    module, batch = runpy.run_path(FILE)["nano"]()
    assert mw.capture(module, batch).tokens_per_sample > 1
    with pytest.raises(ModelError, match="nobody gave a loss"):
        mw.capture(module, {"idx": batch["idx"]})
    assert mw.capture(module, {"idx": batch["idx"]}, loss=lambda output, _: output[0].square().mean())


def compare_on_rank(function: str, request: PlanRequest) -> ParityResult:
    source = resolve(f"{FILE}:{function}")
    plan = plain_plan(request, capture_source(source, "fp64"), this_rank().num_ranks, "tests")
    return compare(source, plan, 2, this_rank())


@pytest.mark.parametrize("function", ["nano", "collated", "translated", "labelled"])
@pytest.mark.parametrize("cut", [{"zero": 3}, {"pp": 2}], ids=str)
def test_own_losses_agree_with_one_process(pool: Pools, function: str, cut: dict[str, int]) -> None:
    request = PlanRequest(global_batch=8, microbatch=2, precision="fp64", **cut)  # type: ignore[arg-type]
    for result in pool(2).run(compare_on_rank, function, request):
        assert result.ok, result.first_difference


@pytest.mark.parametrize("function", ["weighs_classes", "reads_frozen"])
@pytest.mark.parametrize("cut", [{"tp": 2}, {"zero": 3}, {"pp": 2}], ids=str)
def test_losses_may_read_what_is_not_trained(pool: Pools, function: str, cut: dict[str, int]) -> None:
    request = PlanRequest(global_batch=8, microbatch=2, precision="fp64", **cut)  # type: ignore[arg-type]
    for result in pool(2).run(compare_on_rank, function, request):
        assert result.ok, result.first_difference


@pytest.mark.parametrize(
    ("function", "said"),
    [("reads_model", "'module'"), ("reads_critic", "CRITIC'"), ("is_trained", "the loss is a Centres")],
)
def test_losses_may_read_nothing_that_is_trained(function: str, said: str) -> None:
    with pytest.raises(ModelError, match=f"{said}, which has weights to be trained"):
        resolve(f"{FILE}:{function}")


def losses_on_rank() -> tuple[list[float], list[float]]:
    """Steps of a causal model on collated batches by `apply`, and by plain torch on all of the batch."""
    module, batch = runpy.run_path(FILE)["collated"]()
    torch.manual_seed(0)
    other = type(module)(module.config)
    other.load_state_dict(module.state_dict())
    request = PlanRequest(global_batch=8, microbatch=2, precision="fp32", zero=1)
    plan = plain_plan(request, mw.capture(module, batch), this_rank().num_ranks, "tests")
    program = mw.apply(module, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    found = [program.step(batch).loss for _ in range(3)]
    optimizer, expected = torch.optim.SGD(other.parameters(), lr=0.1), []
    for _ in range(3):
        loss = other(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    return found, expected


COPIES = ["unshifted", "nano_of_copies"]


@pytest.mark.parametrize("function", COPIES)
def test_a_model_that_takes_labels_and_does_not_shift_them_is_found(function: str) -> None:
    with pytest.raises(ModelError, match="nothing shifts them"):
        find_in_source(resolve(f"{FILE}:{function}"))
    assert find_in_source(resolve(f"{FILE}:collated")) is None


def test_a_model_that_shifts_labels_which_already_follow_is_found() -> None:
    with pytest.raises(ModelError, match="two tokens ahead"):
        find_in_source(resolve(f"{FILE}:shifted_again"))
    assert find_in_source(resolve(f"{FILE}:labelled")) is None


def refused_on_rank(function: str, cut: dict[str, int]) -> str:
    module, batch = runpy.run_path(FILE)[function]()
    request = PlanRequest(global_batch=8, microbatch=4, precision="fp32", **cut)  # type: ignore[arg-type]
    plan = plain_plan(request, mw.capture(module, batch), this_rank().num_ranks, "tests")
    program = mw.apply(module, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    try:
        program.step(batch)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("function", "cut"), [("unshifted", {"zero": 3}), ("nano_of_copies", {"pp": 2})], ids=str)
def test_apply_refuses_copies_at_its_first_step(pool: Pools, function: str, cut: dict[str, int]) -> None:
    for said in pool(2).run(refused_on_rank, function, cut):
        assert "nothing shifts them" in said


def test_apply_minimises_what_transformers_would(pool: Pools) -> None:
    for found, expected in pool(2).run(losses_on_rank):
        assert found == pytest.approx(expected, rel=1e-5)
        assert found[-1] < found[0]
