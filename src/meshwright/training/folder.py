"""A run folder: settings.toml, plan.json, estimate.json, trace.json, metrics.jsonl, checkpoints/.

Beside them, for the report: cluster.json, forecast.json (the predicted step, moment by moment), search.json (where the plan was
searched) and traces/ (of every rank; trace.json is that of the rank with the highest peak).
live/ holds what each rank last said about itself, launch/ the settings and job files of `meshwright launch`. Where something went
wrong: faults.jsonl, hang.txt (stacks of all ranks). launchers.txt names the processes that started the ranks: what they start
again belongs to the same run. run.json has the id of the run (`run_id.py`); run.lock names the process that writes into the
folder, as long as it does (`lock.py`).
"""

from __future__ import annotations

from pathlib import Path

from meshwright.core.errors import CheckpointError, InputError
from meshwright.training import lock, run_id
from meshwright.training.kept import clear_left, latest
from meshwright.training.lock import RunLock
from meshwright.training.position import read_progress


class RunFolder:
    """Names the files of a run; makes nothing until asked."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.settings = self.path / "settings.toml"
        self.plan = self.path / "plan.json"
        self.estimate = self.path / "estimate.json"
        self.trace = self.path / "trace.json"
        self.cluster = self.path / "cluster.json"
        self.forecast = self.path / "forecast.json"
        self.search = self.path / "search.json"
        self.traces = self.path / "traces"
        self.live = self.path / "live"
        self.launch = self.path / "launch"
        self.metrics = self.path / "metrics.jsonl"
        self.faults = self.path / "faults.jsonl"
        self.hang = self.path / "hang.txt"
        self.launchers = self.path / "launchers.txt"
        self.run_id = self.path / run_id.FILE
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"

    def trace_of(self, rank: int) -> Path:
        return self.traces / f"rank-{rank:05d}.json"

    def start_fresh(self, held: RunLock | None = None) -> Path | None:
        """Make the folder of a new run. One that is already there is moved aside, never overwritten; returns where to.

        held: the lock of the folder, where this process has it.
        """
        moved = None
        if held is None:
            lock.check_free(self.path)
        self.check_free()
        if self.is_run:
            moved = move_aside(self.path)
            self.path.mkdir()
            if held is not None:
                held.follow(moved)
            if (moved / self.launch.name).exists():  # this run may be a job that was started from there
                (moved / self.launch.name).rename(self.launch)
        self._make()
        run_id.write_id(self.path, run_id.new_id())
        return moved

    @property
    def is_run(self) -> bool:
        """Whether a run was laid out here; one of the files that say so may have been removed."""
        return self.settings.exists() or (self.path / run_id.FILE).exists()

    def check_free(self) -> None:
        """A folder of something else is refused. One that holds only the files of a launch is as good as empty."""
        own = (self.launch.name, lock.FILE)
        held = self.path.exists() and any(
            one.name not in own and not one.name.startswith(f".{lock.FILE}") for one in self.path.iterdir()
        )
        if held and not self.is_run:
            raise InputError(f"{self.path} exists and is not a run folder: choose another with --out")

    def reopen(self) -> None:
        """For a run to be resumed."""
        if not self.settings.exists():
            raise InputError(f"{self.path} holds no run to resume: start it without --resume")
        self._make()
        self.clear_left()
        if not run_id.read_id(self.path):  # a run of an earlier version, or one that takes over what it finds
            run_id.write_id(self.path, self._id_in_checkpoints() or run_id.new_id())

    def clear_left(self) -> None:
        """What earlier starts of this run, killed in the middle of something, have left behind. Its lock is held by now."""
        clear_left(self.checkpoints)
        for folder in (self.path, self.live, self.traces):
            for path in folder.glob(".*.draft"):
                path.unlink(missing_ok=True)

    def _id_in_checkpoints(self) -> str:
        newest = latest(self.checkpoints)
        try:
            return read_progress(newest).run if newest is not None else ""
        except (InputError, CheckpointError):
            return ""  # the ranks look closer, and say what they find

    def _make(self) -> None:
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"run folder {self.path} cannot be made: {error.strerror}") from error


def move_aside(folder: Path) -> Path:
    """Rename a folder to the first name with a number that is free; returns that."""
    number = 1
    while (name := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(name)
    return name
