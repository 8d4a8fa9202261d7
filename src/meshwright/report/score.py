"""How well predictions agree with published runs.

    error of a run       |predicted / measured - 1|; 1 for a run that cannot be predicted
    out of memory        recall: of the runs that ran out, the share we called so; false alarms: of those that ran, the same
    sweep                runs in which only the plan differs: rank correlation of predicted and measured step time, and regret:
                         measured time of the run we would have chosen, over the best run's

Constants are those fitted without the run's own table (core/constants.py), so the score is out of sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median

import msgspec

from meshwright.core.cluster import Cluster, Facts, from_facts
from meshwright.core.codec import Value
from meshwright.core.errors import MeshwrightError, nearest
from meshwright.core.graph import Casting, Graph, Precision
from meshwright.core.units import GIB
from meshwright.cost.estimate import estimate
from meshwright.interop.published import Run, Unreadable
from meshwright.report.published import plan_of, read

GraphOf = Callable[[str, Precision, Casting], Graph]

UNFORESEEN = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)
"""What a row that nobody thought of may raise: it fails, the others are still predicted."""


class Prediction(Value, kw_only=True):
    """What we say of one run."""

    run: Run | Unreadable
    step_seconds: float | None = None
    peak_bytes: int | None = None
    """As the driver's tool reads it: what the allocator reserves and the context."""
    fits: bool | None = None
    failure: str = ""

    @property
    def time_error(self) -> float | None:
        """Signed; None where nothing was measured."""
        if self.run.step_seconds is None:
            return None
        return 1.0 if self.step_seconds is None else self.step_seconds / self.run.step_seconds - 1

    @property
    def memory_error(self) -> float | None:
        if self.run.peak_gb is None:
            return None
        return 1.0 if self.peak_bytes is None else self.peak_bytes / (self.run.peak_gb * GIB) - 1


class Score(Value, kw_only=True):
    """None where a table has no such runs."""

    num_rows: int
    step_time_median_error: float | None = None
    step_time_p90_error: float | None = None
    memory_median_error: float | None = None
    memory_p90_error: float | None = None
    oom_recall: float | None = None
    oom_false_alarm_rate: float | None = None
    sweep_spearman: float | None = None
    sweep_regret_median: float | None = None
    num_sweeps: int = 0
    num_failures: int = 0


def predict(runs: Iterable[Run | Unreadable], clusters: dict[str, Facts], graph_of: GraphOf) -> list[Prediction]:
    return [_predict(run, clusters, graph_of) for run in runs]


def _predict(run: Run | Unreadable, clusters: dict[str, Facts], graph_of: GraphOf) -> Prediction:
    """A run that cannot be predicted says why; it counts as an error of 100 %."""
    if isinstance(run, Unreadable):
        return Prediction(run=run, failure=run.problem)
    try:
        cluster = cluster_of(run, clusters)
        reading = read(run, facts_of(run, clusters))
        graph = graph_of(reading.model, reading.precision, reading.casting)
        found = estimate(graph, plan_of(reading, graph, ""), cluster, reading.recipe)
    except MeshwrightError as error:
        return Prediction(run=run, failure=str(error))
    except UNFORESEEN as error:
        said, *_ = f"{type(error).__name__}: {error}".splitlines()  # torch adds its stack
        return Prediction(run=run, failure=said)
    held = found.reserved_bytes + found.context_bytes
    return Prediction(run=run, step_seconds=found.step_seconds, peak_bytes=held, fits=found.fits)


def facts_of(run: Run, clusters: dict[str, Facts]) -> Facts:
    if run.cluster not in clusters:
        raise MeshwrightError(f"no cluster is called '{run.cluster}': {nearest(run.cluster, clusters)}")
    return clusters[run.cluster]


def cluster_of(run: Run, clusters: dict[str, Facts]) -> Cluster:
    facts = facts_of(run, clusters)
    found: Cluster = from_facts(run.cluster, facts, without=run.source_table)
    return msgspec.structs.replace(found, num_hosts=-(-run.num_gpus // facts.devices_per_host))


def score(predictions: Iterable[Prediction]) -> Score:
    found = list(predictions)
    times = sorted(abs(p.time_error) for p in found if p.time_error is not None)
    memories = sorted(abs(p.memory_error) for p in found if p.memory_error is not None)
    failed = [p for p in found if p.run.fits is False]
    ran = [p for p in found if p.run.fits is True]
    sweeps = [s for s in _sweeps(found) if len(s) > 1]
    correlations = [
        c for s in sweeps if (c := spearman([_key(p) for p in s], [p.run.step_seconds or 0 for p in s])) is not None
    ]
    return Score(
        num_rows=len(found),
        step_time_median_error=median(times) if times else None,
        step_time_p90_error=quantile(times, 0.9),
        memory_median_error=median(memories) if memories else None,
        memory_p90_error=quantile(memories, 0.9),
        oom_recall=sum(p.fits is False for p in failed) / len(failed) if failed else None,
        oom_false_alarm_rate=sum(p.fits is False for p in ran) / len(ran) if ran else None,
        sweep_spearman=median(correlations) if correlations else None,
        sweep_regret_median=median(regret(s) for s in sweeps) if sweeps else None,
        num_sweeps=len(sweeps),
        num_failures=sum(bool(p.failure) for p in found),
    )


def by_table(predictions: Iterable[Prediction]) -> dict[str, Score]:
    tables: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        tables.setdefault(prediction.run.source_table, []).append(prediction)
    return {table: score(found) for table, found in tables.items()}


def _sweeps(predictions: list[Prediction]) -> list[list[Prediction]]:
    """Runs with a measured time, by sweep; a row that cannot be read belongs to none."""
    found: dict[tuple[object, ...], list[Prediction]] = {}
    for prediction in predictions:
        if isinstance(prediction.run, Run) and prediction.run.step_seconds is not None:
            found.setdefault(prediction.run.sweep, []).append(prediction)
    return list(found.values())


def _key(prediction: Prediction) -> float:
    """What we would choose by: a plan that does not fit, or cannot be predicted, comes last."""
    if prediction.step_seconds is None:
        return float("inf")
    return prediction.step_seconds * (1e6 if prediction.fits is False else 1)


def regret(sweep: list[Prediction]) -> float:
    """Measured time of the run we would have chosen over the best run's."""
    chosen = min(sweep, key=_key)
    best = min(p.run.step_seconds or 0 for p in sweep)
    return (chosen.run.step_seconds or 0) / best


def quantile(values: list[float], share: float) -> float | None:
    """Of sorted values, by linear interpolation."""
    if not values:
        return None
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


def spearman(one: list[float], other: list[float]) -> float | None:
    """Rank correlation; equal values share their mean rank. None where one side is all equal."""
    ranks, others = _ranks(one), _ranks(other)
    mean = (len(one) + 1) / 2
    covariance = sum((a - mean) * (b - mean) for a, b in zip(ranks, others, strict=True))
    spread = sum((a - mean) ** 2 for a in ranks) * sum((b - mean) ** 2 for b in others)
    return float(covariance / spread**0.5) if spread else None


def _ranks(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]
