"""Plans to compare the fastest with, where the bounds left out all others. Each is the best plan that differs from the fastest in
one choice."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan
from meshwright.rules.divisors import divisors
from meshwright.searching.joint.best_first import BestFirst
from meshwright.searching.joint.short_searches import FEW_OPENED
from meshwright.searching.problem import Problem, narrowed
from meshwright.searching.space import may_compile

FEWEST = 5
"""How many other plans a search shows at least, where there are as many."""


def comparisons(found: BestFirst, costed: list[tuple[Plan, Estimate]]) -> list[tuple[Plan, Estimate]]:
    """As many plans as are missing to `FEWEST`."""
    assert found.fastest is not None
    known = {plan for plan, _ in costed}
    more: list[tuple[Plan, Estimate]] = []
    for otherwise in _otherwise(found.fastest[0], found.problem):
        if len(known) > FEWEST:
            break
        narrow = narrowed(found.problem, otherwise)
        if narrow is None:
            continue
        one = BestFirst(narrow, found.drafts, most_costed=1, most_opened=FEW_OPENED)
        one.run()
        more += [pair for pair in one.costed if pair[0] not in known]
        known |= {plan for plan, _ in one.costed}
    return more


def _otherwise(plan: Plan, problem: Problem) -> Iterator[dict[str, object]]:
    """Parts of a request that each fix one choice otherwise, those that change a plan most first. The search proposes each of these
    choices by itself. A choice that the model or the cluster does not allow finds no plan."""
    mesh = plan.mesh
    for axis in ("tp", "pp", "cp"):
        degree = getattr(mesh, axis)
        yield {axis: degree // 2 if degree > 1 and degree % 2 == 0 else 2 * degree}
    if mesh.dp * mesh.cp > 1:
        for stage in sorted({0, 1, 2, 3} - {plan.zero}):
            yield {**mesh.degrees, "zero": stage}
    yield {"recompute": "none" if plan.recompute else "full"}
    if plan.microbatch > 1:
        smaller = divisors(plan.microbatch)[-2]
        yield {"microbatch": smaller}
        yield {"microbatch": 1}
    if may_compile(problem, mesh.tp, mesh.cp):
        yield {"compile": not plan.compile}
    if plan.offload.what != "none":
        yield {"offload": "none"}
