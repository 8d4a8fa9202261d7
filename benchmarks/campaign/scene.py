"""A Scene: one run of `meshwright train`, with its folder on a disk of its own, from its first start through faults to its end.

scene-7/settings.toml      what is trained
scene-7/disk/run/          the run folder; disk is a file system of its own where one can be mounted
scene-7/tmp/               TMPDIR of the commands
scene-7/log.txt            all that the commands have printed
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from injection import age_seconds, alive, children, ranks_of

from campaign.mounts import mount_disk, unmount
from campaign.plans import STATE, PlanKind, write_settings
from meshwright.training.kept import all_of, step_of

MARK = "MESHWRIGHT_FAULTS_SCENE"
"""In the environment of all processes of a scene: those that outlive their command are found by it."""
PATIENCE_SECONDS = 600.0
GRACE_SECONDS = 20.0
"""For processes that the kernel ends with their launcher."""
LOOK_SECONDS = 0.01


class StuckError(Exception):
    """Something that had to come did not come."""


class Scene:
    def __init__(self, name: str, plan: PlanKind, folder: Path, has_disk: bool, timeout_seconds: float) -> None:
        """timeout_seconds: for one rank to wait for another, before the run says that it hangs."""
        self.name, self.plan, self.folder, self.has_disk = name, plan, folder, has_disk
        self.disk, self.out, self.tmp = folder / "disk", folder / "disk/run", folder / "tmp"
        self.log = folder / "log.txt"
        self.mark = f"{os.getpid()}-{name}"
        self.command: subprocess.Popen[bytes] | None = None
        self.is_scattered = False
        """Whether its folder was moved or removed: what was written before lies elsewhere, or nowhere."""
        self.lacks_lines = False
        """Whether its metrics were removed: those that are there have to be right."""
        self.lost_steps = 0
        folder.mkdir()
        self.tmp.mkdir()
        mount_disk(self.disk) if has_disk else self.disk.mkdir()
        self.settings = write_settings(plan, folder, timeout_seconds)

    def close(self) -> None:
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if self.has_disk:
            unmount(self.disk)

    # Commands

    def spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        """`meshwright train ARGUMENTS`, in a session of its own, as a terminal would have it."""
        own = {MARK: self.mark, "TMPDIR": str(self.tmp), "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor")}
        environment = {**os.environ, **own, "COLUMNS": "400", "PYTHONUNBUFFERED": "1"}
        with self.log.open("ab") as log:
            log.write(f"\n$ meshwright train {' '.join(arguments)}\n".encode())
            log.flush()
            return subprocess.Popen(
                [sys.executable, "-m", "meshwright", "train", *arguments],
                stdout=log, stderr=log, env=environment, cwd=self.folder, start_new_session=True,
            )  # fmt: skip

    def go_on(self) -> subprocess.Popen[bytes]:
        """The command that runs; started, or resumed where there is a checkpoint, if none does."""
        if self.command is None or self.command.poll() is not None:
            if all_of(self.out / "checkpoints"):
                self.command = self.spawn("--resume", str(self.out))
            else:
                self.command = self.spawn(str(self.settings), "--out", str(self.out))
        return self.command

    @property
    def is_running(self) -> bool:
        return self.command is not None and self.command.poll() is None

    def end(self) -> int:
        """Wait for the command; returns its exit code. Its processes are to be gone with it."""
        assert self.command is not None
        self.wait(lambda: not self.is_running, "the command to end")
        return int(self.command.returncode)

    def note_loss(self) -> None:
        """The command has ended: steps that a resumed run has to do again."""
        newest = self.newest_step()
        self.lost_steps += max(0, self.num_steps() - newest)

    # What it does at this moment

    def ranks(self) -> dict[int, int]:
        return ranks_of(self.command.pid) if self.command is not None else {}

    def template(self) -> int | None:
        """The process that ranks are forked from."""
        ranks = self.ranks()
        assert self.command is not None
        found = [one for one in children(self.command.pid) if one not in ranks.values() and alive(one)]
        return found[0] if ranks and found else None

    def processes(self) -> list[int]:
        """All that live and were started by this scene."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if wanted in file.read_bytes().split(b"\0") and alive(int(file.parent.name)):
                    found.append(int(file.parent.name))
        return found

    def orphans(self) -> list[int]:
        """Processes that are left when no command runs any more."""
        deadline = time.monotonic() + GRACE_SECONDS
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        return left

    def lines(self, folder: Path | None = None) -> list[dict[str, Any]]:
        """What the run has written of its steps; the last line may be half written."""
        found = []
        with suppress(OSError):
            for line in ((folder or self.out) / "metrics.jsonl").read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    found.append(json.loads(line))
        return found

    def num_steps(self) -> int:
        return max((line["step"] + 1 for line in self.lines() if "loss" in line), default=0)

    def is_stepping(self) -> bool:
        """Whether the ranks of this moment have done a step: before that, lines of an earlier start may be there."""
        first = self.ranks().get(0)
        with suppress(OSError):
            written = (self.out / "live/rank-00000.json").stat().st_mtime
            return first is not None and time.time() - written < age_seconds(first)
        return False

    def newest_step(self) -> int:
        """Of the newest checkpoint; 0 where there is none."""
        found = all_of(self.out / "checkpoints")
        return step_of(found[-1]) if found else 0

    def said(self) -> str:
        """All that the commands have printed, without the ends of lines that a terminal makes."""
        return self.log.read_text(errors="replace")

    # Waiting

    def wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise StuckError(f"waited {PATIENCE_SECONDS:.0f} s for {what}")
            time.sleep(LOOK_SECONDS)

    def wait_or_end(self, condition: Callable[[], object], what: str) -> bool:
        """False where the command ended before."""
        self.wait(lambda: not self.is_running or condition(), what)
        return self.is_running

    def state_folder(self) -> Path:
        return self.folder / STATE
