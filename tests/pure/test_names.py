"""Block names: compact for the eye, the same list when expanded."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import module_names, quick

from meshwright.core.errors import InputError
from meshwright.core.names import compact_names, expand_names

numbered_runs = st.builds(
    lambda stem, first, count, stride: [f"{stem}.{first + i * stride}" for i in range(count)],
    module_names,
    st.integers(0, 99),
    st.integers(1, 8),
    st.integers(1, 3),
)


@quick
@given(st.lists(module_names, max_size=20))
def test_expand_undoes_compact(names: list[str]) -> None:
    assert expand_names(compact_names(names)) == tuple(names)


@quick
@given(st.lists(numbered_runs, max_size=4))
def test_expand_undoes_compact_on_runs(runs: list[list[str]]) -> None:
    names = [name for run in runs for name in run]
    assert expand_names(compact_names(names)) == tuple(names)


@quick
@given(numbered_runs.filter(lambda run: len(run) > 2))
def test_a_run_becomes_one_pattern(run: list[str]) -> None:
    assert len(compact_names(run)) == 1


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        ([], ()),
        ([f"blocks.{i}" for i in range(24)], ("blocks.0-23",)),
        ([f"blocks.{i}" for i in range(0, 24, 2)], ("blocks.0-22/2",)),
        (["embed", "blocks.0", "blocks.1", "head"], ("embed", "blocks.0-1", "head")),
        (["blocks.0", "blocks.2"], ("blocks.0", "blocks.2")),
        (["blocks.1", "blocks.0"], ("blocks.1", "blocks.0")),
        (["a.0", "b.1"], ("a.0", "b.1")),
    ],
)
def test_the_compact_form_a_plan_shows(names: list[str], patterns: tuple[str, ...]) -> None:
    assert compact_names(names) == patterns


def test_a_range_may_lie_inside_a_name() -> None:
    assert expand_names(["blocks.0-2.mlp"]) == ("blocks.0.mlp", "blocks.1.mlp", "blocks.2.mlp")


@pytest.mark.parametrize(
    "names", [["blocks.01"], ["blocks.1", "blocks.02"], ["blocks.٣"], ["blocks.0-3"], ["blocks.0-1.mlp"]]
)
def test_odd_names_are_kept_or_refused_never_changed(names: list[str]) -> None:
    with suppress(ValueError):
        assert expand_names(compact_names(names)) == tuple(names)


def test_only_plain_numbers_count() -> None:
    assert compact_names(["blocks.0", "blocks.01", "blocks.٢"]) == ("blocks.0", "blocks.01", "blocks.٢")
    assert expand_names(["blocks.00-03"]) == ("blocks.00-03",)
    with pytest.raises(InputError, match=r"'blocks\.0-3' reads as a range of blocks in a plan: rename the module"):
        compact_names(["blocks.0-3"])


@pytest.mark.parametrize("pattern", ["blocks.3-0", "blocks.0-3/0"])
def test_a_range_that_names_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        expand_names([pattern])
