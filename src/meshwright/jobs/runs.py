"""Run folders as Runs, and Runs as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from meshwright.core.cluster import Cluster
from meshwright.core.codec import Value, write_whole
from meshwright.core.errors import InputError
from meshwright.core.estimate import Estimate
from meshwright.core.files.given_file import read_given
from meshwright.core.plan import Plan
from meshwright.core.result import SearchResult
from meshwright.core.run.fault import RankState
from meshwright.core.run.trace import Forecast, Trace
from meshwright.cost.forecast import forecast
from meshwright.jobs.metric_lines import MetricLines
from meshwright.jobs.output import writing
from meshwright.planner.plan import PlanQuestion
from meshwright.report.contest import said_about
from meshwright.report.page import page
from meshwright.report.run import Run
from meshwright.training.folder import RunFolder

V = TypeVar("V", bound=Value)


def read_runs(folders: Sequence[str]) -> list[Run]:
    """All that the folders know; names are the shortest that tell them apart. A folder of a comparison stands for its runs."""
    given = [Path(folder) for folder in folders]
    whole = [path.resolve() for path in given]
    repeated = next((path for place, path in enumerate(whole) if path in whole[:place]), None)
    if repeated is not None:
        raise InputError(f"{given[whole.index(repeated)]} is given twice: name each run folder once")
    if len(given) == 1 and (compared := _compared(given[0])):
        return compared
    return [read_run(str(path), name) for path, name in zip(given, telling_names(whole), strict=True)]


def telling_names(paths: Sequence[Path]) -> list[str]:
    """What is left of paths without the parts that all of them begin with, and those that all of them end with."""
    if len(paths) == 1:
        return [paths[0].name]
    parts = [path.parts for path in paths]
    while all(one and one[0] == parts[0][0] for one in parts):
        parts = [one[1:] for one in parts]
    while all(len(one) > 1 and one[-1] == parts[0][-1] for one in parts):
        parts = [one[:-1] for one in parts]
    return ["/".join(one) or path.name for one, path in zip(parts, paths, strict=True)]


def _compared(folder: Path) -> list[Run]:
    """The runs that a comparison has left, one for each plan with its repeats, as far as it came; none of another folder."""
    if (folder / "settings.toml").exists():
        return []
    plans: dict[Path, list[Path]] = {}
    for trace in sorted(folder.glob("*/*/trace.json")):
        if trace.parent.name.isdecimal():
            plans.setdefault(trace.parent.parent, []).append(trace.parent)
    found = [
        together([read_run(str(one), plan.name.replace("-on-", " on ")) for one in repeats])
        for plan, repeats in plans.items()
    ]
    return sorted(found, key=lambda run: (run.plan.world, run.name))


def together(runs: Sequence[Run]) -> Run:
    """Repeats as one: all their steps count, the last one's trace is shown."""
    return replace(runs[-1], repeats=tuple(run.own_seconds for run in runs[:-1]))


def read_run(path: str, name: str = "", *, is_live: bool = False, lines: MetricLines | None = None) -> Run:
    """A run folder. is_live: the run may still go on, and has no trace yet. lines: of its metrics, of who looks again and again."""
    folder = RunFolder(path)
    if not folder.settings.exists():
        raise InputError(
            f"{folder.path} is not a run folder: it has no settings.toml{_nested_hint(folder.path)}; give a folder that "
            "`meshwright train` or `compare` has written, such as runs/demo"
        )
    if not is_live and not folder.trace.exists():
        raise InputError(
            f"{folder.path} has no trace.json: the run has not finished, or it failed; `meshwright watch {folder.path}` shows "
            "a run that goes on, `meshwright train … --resume` ends one that stopped"
        )
    plan = _read(Plan, folder.plan)
    traces = _traces(folder, plan.hash)
    return Run(
        name=name or folder.path.name,
        plan=plan,
        estimate=_read(Estimate, folder.estimate),
        cluster=_read_if_there(Cluster, folder.cluster),
        forecast=_read_if_there(Forecast, folder.forecast),
        result=_read_if_there(SearchResult, folder.search),
        traces=traces,
        metrics=(lines or MetricLines(folder.metrics)).read(),
        settings=read_given(folder.settings),
        remark=_remark(folder, traces),
    )


def rank_states(folder: RunFolder) -> list[RankState]:
    return [RankState.load(file) for file in sorted(folder.live.glob("rank-*.json"))]


def has_ended(folder: RunFolder) -> bool:
    """A run writes its trace last of all; one that was resumed has an older one until then."""
    if not folder.trace.exists():
        return False
    return not folder.metrics.exists() or folder.trace.stat().st_mtime >= folder.metrics.stat().st_mtime


def planned_run(result: SearchResult, asked: PlanQuestion) -> Run:
    """A search that nothing has run of yet."""
    plan, cluster = result.plan, asked.cluster
    return Run(
        name=f"{plan.model or 'a model'}, planned",
        plan=plan,
        estimate=result.estimate,
        cluster=cluster,
        forecast=forecast(asked.graph_run_by(plan), plan, cluster, asked.limits.recipe),
        result=result,
    )


def check_comparable(runs: Sequence[Run]) -> None:
    """Runs of different models say nothing about each other."""
    first = runs[0]
    for other in runs[1:]:
        if other.plan.graph != first.plan.graph:
            raise InputError(
                f"{first.name} trains {first.plan.model or 'a model'} and {other.name} trains {other.plan.model or 'another'}: "
                "runs side by side must train the same model; make a report of each"
            )


def write_page(runs: Sequence[Run], file: str) -> Path:
    """One file; of several runs with what they say together."""
    if not file.endswith((".html", ".htm")):
        raise InputError(f"{file}: a report is an .html file")
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs of {runs[0].plan.model or 'one model'}"
    with writing(file):
        return write_whole(Path(file), page(runs, title, said=said_about(runs) if len(runs) > 1 else ()))


def _traces(folder: RunFolder, plan: str) -> tuple[Trace, ...]:
    """Of every rank where the run left them, else of the one rank that is known; of a run that goes on, its last sampled step."""
    if not folder.trace.exists():
        so_far = (_read(Trace, file) for file in sorted(folder.live.glob("sample-*.json")))
        return tuple(trace for trace in so_far if trace.plan == plan)
    files = sorted(folder.traces.glob("rank-*.json")) or [folder.trace]
    traces = tuple(_read(Trace, file) for file in files)
    for file, trace in zip(files, traces, strict=True):
        if trace.plan != plan:
            raise InputError(
                f"{file} is of another plan ({trace.plan}) than {folder.plan} ({plan}): the folder mixes two runs; train again "
                "into a fresh folder with --out"
            )
    return traces


def _read(kind: type[V], path: Path) -> V:
    try:
        return kind.load(path)
    except InputError as error:
        raise InputError(
            f"{error}; restore the file, read it with the version that wrote it, or train again with --out FOLDER"
        ) from error


def _read_if_there(kind: type[V], path: Path) -> V | None:
    return _read(kind, path) if path.exists() else None


def _remark(folder: RunFolder, traces: tuple[Trace, ...]) -> str:
    words = []
    if folder.trace.exists() and len(traces) < traces[0].num_ranks:
        words.append(
            f"Only rank {traces[0].rank} of {traces[0].num_ranks} is shown: the run was recorded by an older version."
        )
    if not folder.forecast.exists():
        words.append("It left no forecast.json, so that no predicted step is drawn.")
    return " ".join(words)


def _nested_hint(path: Path) -> str:
    """The folder above several runs is the usual slip."""
    if not path.exists():
        return ", and does not exist"
    inside = sorted(one.parent.name for one in path.glob("*/settings.toml")) if path.is_dir() else []
    return f"; did you mean one of its folders: {', '.join(inside[:5])}?" if inside else ""
