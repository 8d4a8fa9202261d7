"""A run under torchrun whose ranks were started again: it goes on where it was, on as many ranks as there are now."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from meshwright.planner.decision import Decision
    from meshwright.runtime.ranks import Rank
    from meshwright.training.folder import RunFolder
    from meshwright.training.settings import Settings


def continued(settings: Settings, resume: bool, rank: Rank, console: Console) -> tuple[Settings, bool, bool]:
    """Settings, whether to resume, and whether this is a later start of the same job. Every rank calls it.

    It is one where some launcher of these ranks has started ranks for this run folder before. torch counts its own restarts too
    (TORCHELASTIC_RESTART_COUNT), but not those after hosts have come or gone, and not for which folder.
    """
    from meshwright.jobs.restarting import resumable_step
    from meshwright.jobs.settings import as_before
    from meshwright.runtime.messages.exchange import all_ranks, from_first
    from meshwright.runtime.restarts import launcher
    from meshwright.training.folder import RunFolder

    folder = RunFolder(settings.folder)
    launchers = all_ranks(launcher(), str)
    step = from_first(lambda: resumable_step(folder) if _is_same_job(folder, launchers) else None, int | None)
    if step is None:
        return settings, resume, False
    if rank.is_first:
        on = f"go on from step {step}" if step else "begin again: there is no checkpoint yet"
        console.print(f"started again by the launcher: {rank.num_ranks} ranks {on}", highlight=False)
    return as_before(settings) if step else settings, step > 0, True


def _is_same_job(folder: RunFolder, launchers: list[str]) -> bool:
    if not folder.launchers.exists() or not folder.plan.exists():
        return False
    return bool(set(folder.launchers.read_text(encoding="utf-8").split("\n")) & set(launchers))


def note_launchers(folder: RunFolder, rank: Rank) -> None:
    """For the next start. Every rank calls it."""
    from meshwright.core.codec import write_whole
    from meshwright.runtime.messages.exchange import all_ranks
    from meshwright.runtime.restarts import launcher

    launchers = all_ranks(launcher(), str)
    if rank.is_first:
        write_whole(folder.launchers, "\n".join(sorted(set(launchers))))


@contextmanager
def placed() -> Iterator[None]:
    """An error that no launcher of ours will put into words gets its place: rank, host, step and last collective."""
    from meshwright.core.errors import MeshwrightError, RunError
    from meshwright.runtime.rank import fault_of, without_chatter

    try:
        yield
    except MeshwrightError:
        raise
    except Exception as error:
        said = without_chatter(str(error))
        fault = fault_of(error, said)
        whose = f"rank {fault.ranks[0]} of {fault.num_ranks}"
        if fault.kind != "lost":
            error.add_note(f"{whose}: {fault.place}")
            raise
        words = f"{whose} lost the connection to another rank: {said}\n  {fault.place}"
        raise RunError(words, fault) from None


def decision_again(settings: Settings, world: int, folder: RunFolder) -> Decision:
    """The plan the run had, where it still fits the ranks; else one made anew, with which the folder goes on."""
    from meshwright.core.errors import PlanError
    from meshwright.core.estimate import Estimate
    from meshwright.core.plan import Plan
    from meshwright.jobs.layout import write_plan
    from meshwright.jobs.restarting import replan
    from meshwright.planner.decision import Decision
    from meshwright.training.settings import Settings

    plan = Plan.load(folder.plan)
    if plan.world == world:
        return Decision(plan, Estimate.load(folder.estimate), None)
    _, decision = replan(settings, world, folder)
    if decision.plan.world != world:
        raise PlanError(
            f"no plan of global batch {plan.global_batch} runs on {world} ranks, but one does on {decision.plan.world}: start those"
        )
    write_plan(folder, Settings.load(folder.settings), decision)
    return decision
