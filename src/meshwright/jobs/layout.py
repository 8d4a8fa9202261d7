"""What comes before a run: its plan is decided, there is room for its checkpoints, and its folder is laid out."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console

from meshwright.core.cluster import Cluster
from meshwright.core.codec import Value
from meshwright.core.errors import InputError
from meshwright.core.files.cache import content_of
from meshwright.core.graph import Graph
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.core.result import describe
from meshwright.core.units import format_bytes
from meshwright.cost.memory.local_parameters import items_of, total_elements
from meshwright.jobs.output import writing
from meshwright.jobs.settings import with_plan_of_before
from meshwright.measure.checking.check import check
from meshwright.measure.checking.kept import Kept, code_of
from meshwright.measure.checking.reduced import needs_check
from meshwright.measure.mean_loss import cuts_batch, find_in_source
from meshwright.models.faked.build import build_followable
from meshwright.models.source import resolve
from meshwright.planner.clusters import find_cluster
from meshwright.planner.decision import Decision, check_batch, decide, precision_of_run, with_host_link, world_of_run
from meshwright.planner.graphs import both_castings
from meshwright.report.plan_view import plan_view
from meshwright.training.boards import check_boards
from meshwright.training.checkpoint import check_same_model
from meshwright.training.company import mend
from meshwright.training.data import check_data
from meshwright.training.folder import RunFolder
from meshwright.training.lock import RunLock
from meshwright.training.optimizers import check_optimizer, recipe_of
from meshwright.training.places import places_of
from meshwright.training.pretrained import check_weights
from meshwright.training.run_id import read_id
from meshwright.training.saver import FARE_BYTES
from meshwright.training.settings import Settings

MOST_CHECKED = 300_000_000
"""Parameters of a model that is run in float64 in the command's own process: some GiB, and seconds."""


def lay_out(settings: Settings, resume: bool, console: Console, lock: RunLock) -> tuple[Path, Decision]:
    """Decide the plan of a run on local ranks, and write its folder. lock: of the folder, held."""
    check_settings(settings, resume)
    world = world_of_run(settings)
    cluster = find_cluster(settings.cluster, settings.hosts, world, settings.device, settings.backend, console.print)
    return lay_out_on(cluster, settings, world, resume, console, lock)


def check_settings(settings: Settings, resume: bool) -> None:
    """What can be refused before anything is measured."""
    check_batch(settings)
    source = resolve(settings.model)
    check_data(settings.data, source, has_weights=settings.weights is not None and not resume)
    check_optimizer(settings.optimizer)
    if not resume:
        check_weights(settings, source)
    check_boards(settings)


def lay_out_on(
    cluster: Cluster, settings: Settings, world: int | None, resume: bool, console: Console, lock: RunLock
) -> tuple[Path, Decision]:
    """The same on a cluster that is known. world: the number of ranks, where it is given."""
    cluster = with_host_link(cluster, settings)
    wish = with_plan_of_before(settings, world or cluster.num_devices) if resume else settings
    graphs = both_castings(settings.model, precision_of_run(wish))
    decision = decide(wish, graphs, cluster, world)
    _show(decision, cluster, console)
    if not resume:
        _check_loss(settings.model, decision.plan, graphs[0].num_parameters, console)
    _check_plan(settings, decision.plan, console)
    folder = RunFolder(settings.folder)
    check_room(settings, checkpoint_bytes(graphs[0], decision.plan, recipe_of(settings)), console)
    _open(folder, settings, decision, resume, console, lock)
    write_plan(folder, settings, decision)
    _save(cluster, folder.cluster)
    return folder.path, decision


def _check_loss(model: str, plan: Plan, num_parameters: int, console: Console) -> None:
    """A user's loss that sees the whole batch is refused for a plan that cuts it. Others' losses are means, as written here."""
    if ".py:" not in model or not cuts_batch(plan):
        return
    if num_parameters > MOST_CHECKED:
        console.print(
            f"not checked, since {model} is large: whether its loss is a mean over samples or labels, as the parts of a batch need"
        )
        return
    found = find_in_source(resolve(model).small())
    if found is not None:
        raise found.refusal(plan)


def _check_plan(settings: Settings, plan: Plan, console: Console) -> None:
    """A user's own model under a plan that divides it: a small copy is compared with one process first."""
    model = settings.model
    if not needs_check(plan) or not (".py:" in model or model.startswith("hf:")):
        return
    if not settings.check:
        console.print("not checked against one process: check is off (--no-check)")
        return
    found = check(resolve(model).small(), plan, {"model": model}, Kept(code_of(model)), console.print)
    if found.status == "not checked":
        console.print(f"not checked against one process: {found.words}")
    elif found.status == "same":
        console.print(f"a small copy does what one process does ({found.seconds:.0f} s)")


def _show(decision: Decision, cluster: Cluster, console: Console) -> None:
    if decision.result is not None:
        console.print(plan_view(decision.result, cluster))
    else:
        console.print(f"plan: {describe(decision.plan)}")


def _open(
    folder: RunFolder, settings: Settings, decision: Decision, resume: bool, console: Console, lock: RunLock
) -> None:
    """The folder of before, if its checkpoints are of the same model, or a fresh one."""
    if resume:
        mend(folder, console.print)
        folder.reopen()
        shapes, run = lambda: _shapes(settings.model), read_id(folder.path)
        check_same_model(places_of(folder), decision.plan.graph, shapes, run)
    elif moved := folder.start_fresh(lock):
        console.print(f"{folder.path} held an earlier run: it is now {moved}")


def write_plan(folder: RunFolder, settings: Settings, decision: Decision) -> None:
    """What ranks read at their start."""
    _save(settings, folder.settings)
    _save(decision.plan, folder.plan)
    _save(decision.estimate, folder.estimate)
    if decision.forecast is not None:
        _save(decision.forecast, folder.forecast)
    if decision.result is not None:
        _save(decision.result, folder.search)


def _save(value: Value, path: Path) -> None:
    """A file that says the same already is left alone: a resumed run needs no room for it."""
    if content_of(path) == (value.to_toml() if path.suffix == ".toml" else value.to_json()):
        return
    with writing(path, ": make room or check its rights, or choose another folder with --out"):
        value.save(path)


def _shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Of a model's tensors by name; takes no memory."""
    built = build_followable(resolve(model).build)
    return {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()}


def checkpoint_bytes(graph: Graph, plan: Plan, recipe: Recipe) -> int:
    """Parameters, and what the optimizer keeps for those that are trained; all ranks together."""
    items, parameters = items_of(plan, recipe), graph.own_parameters
    trained = total_elements(parameters, trainable_only=True)
    return total_elements(parameters) * items.parameter + trained * items.state


def check_room(settings: Settings, needed: int, console: Console) -> None:
    """A disk without room for one checkpoint is refused; where it is short of all that will be kept, that is said."""
    folder, elsewhere = Path(settings.folder), settings.checkpoint.elsewhere
    places = [folder] if elsewhere is None else [folder, Path(elsewhere)]
    free = max(_free(place) for place in places)
    count = settings.checkpoint.keep + 1 if settings.checkpoint.every else 1
    one = needed + FARE_BYTES
    if free < one:
        raise InputError(
            f"a checkpoint of this run needs {format_bytes(one)}, but the disk of {folder.absolute()} has {format_bytes(free)} "
            "free: make room, or choose another disk with --out or checkpoint.elsewhere"
        )
    if free < count * one:
        console.print(
            f"warning: {count} checkpoints (keep = {settings.checkpoint.keep}, and the one being written) need "
            f"{format_bytes(count * one)}, but the disk of {folder.absolute()} has {format_bytes(free)} free"
        )


def _free(place: Path) -> int:
    """Bytes on the disk of a folder, which may not be there yet."""
    return shutil.disk_usage(next(one for one in (place.absolute(), *place.absolute().parents) if one.exists())).free
