"""Every rule for split tensors against the whole computation: values, sizes and gradients, on ranks that are threads.

The table of rules drives the tests: a name in it without a sample fails. A rule may refuse; it may not be wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from split_groups import SINGLES, samples_of
from split_programs import equation, index, program
from split_runs import WORLDS, World, difference
from split_samples import GROUPS, Sample, runs_whole
from split_ways import drawn_ways, simple_ways
from thread_ranks import threads_for_ranks

from meshwright.runtime.split.collectives import Ranks
from meshwright.runtime.split.layout import Cut, lay
from meshwright.runtime.split.rules import table
from meshwright.runtime.split.splitter import NotSplit, Splitter

ALL = [*GROUPS, *SINGLES]
FEW = 2
"""Ways in which each sample is tried in each world."""
QUICKLY = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.fixture(autouse=True, scope="module")
def _threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with threads_for_ranks():
        yield
    torch.set_num_threads(num_threads)


@cache
def samples(group: str) -> list[Sample]:
    return list(samples_of(group))


def ways(sample: Sample, world: World, seed: int) -> Iterator[object]:
    """Some of the simple ways, and one drawn at random."""
    chosen = random.Random(seed)
    if len(world.axes) == 1:
        simple = list(simple_ways(sample, world))
        yield from chosen.sample(simple, min(len(simple), FEW))
    yield drawn_ways(sample, world, chosen.choice)


@pytest.mark.parametrize("group", ALL)
def test_functions_on_parts_give_what_they_give_on_the_whole(group: str) -> None:
    wrong, right = [], dict.fromkeys((sample.rule for sample in samples(group)), 0)
    for number, sample in enumerate(samples(group)):
        for world in WORLDS.values():
            for way in ways(sample, world, number):
                found = difference(sample, way, world)  # type: ignore[arg-type]
                if found:
                    wrong.append(f"{sample} with {way} in {world}: {found}")
                right[sample.rule] += found == ""
    assert not wrong, "\n".join(wrong[:5])
    assert {rule for rule, count in right.items() if not count} == set()


@pytest.mark.parametrize("group", ALL)
@QUICKLY
@given(data=st.data())
def test_functions_in_any_layout(group: str, data: st.DataObject) -> None:
    check(data.draw(st.sampled_from(samples(group))), data)


@pytest.mark.parametrize("draw", [program, index, equation])
@settings(QUICKLY, max_examples=150)
@given(data=st.data())
def test_programs_in_any_layout(draw: Callable[..., Sample], data: st.DataObject) -> None:
    check(draw(lambda options: data.draw(st.sampled_from(list(options)))), data)


def check(sample: Sample, data: st.DataObject) -> None:
    assume(runs_whole(sample))
    world = data.draw(st.sampled_from(list(WORLDS.values())))
    way = drawn_ways(sample, world, lambda options: data.draw(st.sampled_from(list(options))))
    assert not difference(sample, way, world), f"{sample} with {way} in {world}"


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("torch.func", lambda t: torch.vmap(lambda row: row * 2)(t)),
        ("torch.func", lambda t: torch.func.grad(lambda x: (x * 2).sum())(t)),
        ("as_strided", lambda t: t.as_strided((2, 2), (1, 1))),
        ("add", lambda t: torch.add(t.detach(), 1, out=torch.empty(4, 8, dtype=t.dtype))),
        ("_cdata", lambda t: t._cdata),
        ("resize_", lambda t: t.detach().resize_(2, 4)),
    ],
)
def test_what_cannot_be_told_is_refused(what: str, call: Callable[..., object]) -> None:
    with Splitter([Ranks("cp", 2)]), pytest.raises(NotSplit, match=what):
        call(lay(torch.ones(4, 4, dtype=torch.float64).requires_grad_() * 1, {"cp": Cut(1)}))


def test_a_tensor_that_a_view_changed_elsewhere_is_not_read() -> None:
    with Splitter([Ranks("cp", 2)]):
        tensor = lay(torch.ones(4, 4) * 1, {"cp": Cut(1)})
        tensor[:, 1].zero_()
        with pytest.raises(NotSplit, match="changed in place through a view"):
            tensor.mul(2)


def test_every_rule_has_a_sample() -> None:
    names = {name for names, rule in table.GROUPS if rule is not table.pointwise.plain for name in names.split()}
    names |= {*table.SINGLE, *table.GETTERS}
    tried = {sample.rule for group in ALL for sample in samples(group)}
    known = {
        "__getitem__": "getitem", "__matmul__": "matmul", "__rmatmul__": "rmatmul", "_grad": "grad", "concatenate": "concat",
        "scaled_dot_product_attention": "attention",
    }  # fmt: skip
    elsewhere = {
        "cuda",
        "register_hook",
        "grad_fn",
        "_grad_fn",
    }  # needs a GPU; tried where hooks are (test_own_backward.py)
    assert {name for name in names if known.get(name, name) not in tried} - elsewhere == set()
