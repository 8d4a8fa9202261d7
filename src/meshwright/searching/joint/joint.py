"""The joint search: best first over meshes, schedules, state, cuts and recompute, with bounds that end it.

A node stands for all plans below it and has a bound on their seconds (bounds/step_seconds.py). The node with the least bound is
opened next:

    world        how many devices                                     bound: the least work of any tp and cp, evenly shared out
     tensor      tp                                                   bound: the least work under it, evenly shared out
      submesh    cp, and how tp and cp are run                        bound: likewise, whatever pp and dp are
      family     mesh, sequence parallel, compile                     bound: the least work of any of its microbatches
       shape     and the microbatch                                   bound: the quickest turns under the best state that fits
        turns    schedule and stages a coordinate                     bound: with the schedule's bubble
          point  ZeRO and its groups, offload                         bound: with dp's communication and the update
            cut  where stages end: few are all tried, of many the best by dynamic programming (cuts/best_cut.py)
                 those that cannot fit however much is recomputed are left out (bounds/memory.py)
                 costed with the least recompute that fits (memory_saving/recompute.py)

On a device that is known by constants the least work is that of the smallest degrees and of the whole batch at once (see
unit_tables.py), and a cp that splits tokens further is looked at when the coarser one is open; what was measured may be anything,
and is all looked at.

Short dives find good plans to begin with (short_searches.py): 1f1b without cp for each tp inside a host, those without stages,
then everything on the best mesh so far. Where nothing fits, the nearest misses are costed, and what would make the nearest of them
fit (nearest_misses.py); the search goes on from what fits of these. Where one plan leaves out all others, a few of these are
costed all the same, to tell why they lost (comparisons.py).
The search ends when no open node can be faster than the best plan that fits: that plan is the fastest there is (of all cuts, where
all were tried). After `MOST_COSTED` cuts or `MOST_OPENED` nodes it ends too, and the least bound that is open says how far from the
best the answer may be; then meshes near the best ones are looked at in the order of what is expected of them
(near_meshes.py). Nodes are counted, not seconds, and ties are broken by the order of opening: the same input gives the
same plan.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from meshwright.searching.joint.best_first import MOST_COSTED, MOST_OPENED, BestFirst
from meshwright.searching.joint.candidates import Drafts
from meshwright.searching.joint.comparisons import comparisons
from meshwright.searching.joint.exclusions import left_out
from meshwright.searching.joint.near_meshes import NearMeshes
from meshwright.searching.joint.nearest_misses import changes_that_fit, nearest_misses
from meshwright.searching.joint.short_searches import first_plans, simpler_plans
from meshwright.searching.problem import Outcome, Problem
from meshwright.searching.units import FEW_UNITS

MORE_OF_FEW = 10
"""Times as many nodes where there are few units: their estimates cost little, so be sure."""


def joint(problem: Problem) -> Outcome:
    drafts = Drafts(problem)
    costed = first_plans(problem, drafts)
    more = MORE_OF_FEW if len(drafts.units) <= FEW_UNITS else 1
    found = BestFirst(problem, drafts, known=costed, most_costed=more * MOST_COSTED, most_opened=more * MOST_OPENED)
    found.run()
    if found.fastest is None:
        found = _again(found)
    if found.fastest is not None and found.is_cut_short:
        found.take(NearMeshes(found.problem, found.drafts, found.costed).go_on())
    costed = list(found.costed)
    if found.fastest is not None:
        costed += [] if problem.prefer_fastest else simpler_plans(problem, found)
        costed += comparisons(found, costed)
    bound = (
        found.bound_seconds if 0 < found.bound_seconds < inf else None
    )  # 0: a node of which nothing is known is open
    return Outcome(tuple(costed), max(len(drafts.points), len(costed)), bound, left_out(found))


def _again(found: BestFirst) -> BestFirst:
    """Where no plan was found that fits: from one of the nearest misses that does, or from a change of the nearest that does."""
    problem, drafts = found.problem, found.drafts
    costed = nearest_misses(found)
    if not any(estimate.fits for _, estimate in costed):
        costed = [*costed, *changes_that_fit(problem, costed)]
    if not any(estimate.fits for _, estimate in costed):
        return found
    away = {plan.offload.what for plan, estimate in costed if estimate.fits} - set(problem.offloads)
    if away:
        problem = replace(problem, nothing_fits=tuple(sorted(away)))
        drafts = Drafts(problem)
    again = BestFirst(problem, drafts, known=costed, most_costed=found.most_costed, most_opened=found.most_opened)
    again.run()
    return again
