"""The joint search: best-first branch and bound over meshes, schedules, state, cuts and recompute.

A *node* stands for all plans below it. Each node has a lower bound on the seconds of a step of any of them
(bounds/step_seconds.py). The search opens the node with the least bound next (best_first.py). The levels, and the bound of each:

    world        how many devices                                     the least work of any tp and cp, evenly shared out
     tensor      tp                                                   the least work under it, evenly shared out
      submesh    cp, and how tp and cp are run                        likewise, whatever pp and dp are
      family     mesh, sequence parallel, compile                     the least work of any of its microbatches
       shape     and the microbatch                                   the quickest schedule under the best state that fits
        turns    schedule and stages a coordinate                     with the schedule's bubble
          point  ZeRO and its groups, offload                         with the communication of dp and the update
            cut  where stages end. Few cuts are all tried; of many, dynamic programming takes the best (cuts/best_cut.py)
                 A cut that cannot fit, however much is recomputed, is left out (bounds/memory.py)
                 The others are costed with the least recompute that fits (memory_saving/recompute.py)

Constants describe a device that nobody measured. On such a device the smallest degrees and the whole batch at once have the least
work (unit_tables.py), and the search looks at a cp that splits tokens further when it opens the coarser one. Measured figures may
be anything, so on a measured device the search looks at all degrees.

The search goes in these steps:

    1. Short searches of parts of the space find good plans to begin with: 1f1b without cp for each tp inside a host, plans without
       stages, then everything on the best mesh so far                                          -> short_searches.py
    2. In deep models, meshes near the best ones follow, those with the best expected time first: with a good plan to begin with,
       bounds leave out more                                                                    -> near_meshes.py
    3. The search ends when no open node can be faster than the best plan that fits. That plan is the fastest of all (of all cuts,
       where all were tried)                                                                    -> best_first.py
    4. Where nothing fits, the search costs the nearest misses and the changes that would make the nearest of them fit, and goes on
       from those that fit                                                                      -> nearest_misses.py
    5. After `MOST_COSTED` cuts or `MOST_OPENED` nodes it ends too. The least open bound says how far from the best the answer may
       be. Where it has found a faster plan by then, it looks at the meshes near that one        -> near_meshes.py
    6. It looks for simpler plans that are as fast within the error of an estimate              -> short_searches.py
    7. Where one plan leaves out all others, it costs a few of these all the same, to say why they lost
                                                                                                -> comparisons.py
    8. It names the plans that it did not search                                                -> exclusions.py

The search counts nodes, not seconds, and the order of opening breaks ties: the same input gives the same plan.
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
from meshwright.searching.space import has_many_cuts, is_deep

MORE_OF_FEW, MORE_OF_RANKED = 25, 8
"""Times as many nodes in models that are not deep, whose estimates cost little, and where all cuts are compared: so be sure."""


def joint(problem: Problem) -> Outcome:
    drafts = Drafts(problem)
    costed = first_plans(problem, drafts)
    deep = is_deep(problem)
    if deep:
        costed = NearMeshes(problem, drafts, costed).go_on()
    more = MORE_OF_FEW if not deep else 1 if has_many_cuts(problem) else MORE_OF_RANKED
    found = BestFirst(problem, drafts, known=costed, most_costed=more * MOST_COSTED, most_opened=more * MOST_OPENED)
    found.run()
    if found.fastest is None:
        found = _again(found)
    if found.fastest is not None and found.is_cut_short and found.fastest not in costed:
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
    again = BestFirst(
        problem,
        drafts,
        known=costed,
        most_costed=found.most_costed,
        most_opened=found.most_opened,
        stage="plans like those that fit",
    )
    again.run()
    return again
