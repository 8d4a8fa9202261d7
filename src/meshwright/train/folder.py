"""A run folder: settings.toml, plan.json, estimate.json, trace.json, metrics.jsonl, checkpoints/.

Beside them, for the report: cluster.json, forecast.json (the predicted step, moment by moment), search.json (where the plan was
searched) and traces/ (of every rank; trace.json is that of the rank with the highest peak).
live/ holds what each rank last said about itself, launch/ the settings and job files of `meshwright launch`. Where something went
wrong: faults.jsonl, hang.txt (stacks of all ranks). launchers.txt names the processes that started the ranks: what they start
again belongs to the same run.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.core.errors import InputError


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
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"

    def trace_of(self, rank: int) -> Path:
        return self.traces / f"rank-{rank:05d}.json"

    def start_fresh(self) -> Path | None:
        """Make the folder. A run that is already there is moved aside, never overwritten; returns where to."""
        moved = None
        self.check_free()
        if self.settings.exists():
            moved = move_aside(self.path)
            if (moved / self.launch.name).exists():  # this run may be a job that was started from there
                self.path.mkdir()
                (moved / self.launch.name).rename(self.launch)
        self._make()
        return moved

    def check_free(self) -> None:
        """A folder of something else is refused. One that holds only the files of a launch is as good as empty."""
        held = self.path.exists() and any(one != self.launch for one in self.path.iterdir())
        if held and not self.settings.exists():
            raise InputError(f"{self.path} exists and is not a run folder: choose another with --out")

    def reopen(self) -> None:
        """For a run to be resumed."""
        if not self.settings.exists():
            raise InputError(f"{self.path} holds no run to resume: start it without --resume")
        self._make()

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
