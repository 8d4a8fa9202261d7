"""`meshwright launch --slurm`: settings and a file for sbatch into the run folder, then to SLURM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from meshwright.jobs.launching import Launch
    from meshwright.runtime.slurm import SlurmJob


@dataclass(frozen=True)
class Wishes:
    """What SLURM is told beside the size of the job."""

    partition: str | None
    time: str | None
    options: tuple[str, ...]
    rendezvous: str | None

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """As sbatch has them."""
        from meshwright.core.errors import InputError

        named = [("partition", self.partition), ("time", self.time)]
        found = [(name, value) for name, value in named if value is not None]
        for text in self.options:
            name, sign, value = text.lstrip("-").partition("=")
            if not sign:
                raise InputError(f"--sbatch {text}: give an option of sbatch as NAME=VALUE, like qos=high")
            found.append((name, value))
        return tuple(found)


def submit_to_slurm(wish: Launch, wishes: Wishes, dry_run: bool, console: Console) -> None:
    """Every launch leaves a pair of files of its own: a job that waits must not see those of a later one."""
    from meshwright.runtime.slurm import batch_script, submit

    settings_file = _next_name(wish.folder)
    script = batch_script(_job(wish, wishes, settings_file))
    if dry_run:
        print(script, end="")
        return
    settings_file.parent.mkdir(parents=True, exist_ok=True)
    wish.settings.save(settings_file)
    script_file = settings_file.with_suffix(".sbatch")
    script_file.write_text(script, encoding="utf-8")
    console.print(f"wrote {script_file}", highlight=False, soft_wrap=True)
    if not wish.gpus_per_host and wish.settings.device == "auto":
        console.print('no GPUs are asked for: give --gpus N, or device = "cuda", if the ranks are to have them')
    number = submit(script_file)
    log = wish.folder / f"slurm-{number}.log"
    console.print(f"submitted as job {number}; it writes {log}", highlight=False, soft_wrap=True)
    console.print(f"`meshwright watch {wish.settings.folder}` shows it once it runs", highlight=False, soft_wrap=True)


def _next_name(folder: Path) -> Path:
    number = 1
    while (name := folder / f"job-{number}.toml").exists():
        number += 1
    return name


def _job(wish: Launch, wishes: Wishes, settings_file: Path) -> SlurmJob:
    from pathlib import Path

    from meshwright.runtime.slurm import SlurmJob

    return SlurmJob(
        name=wish.settings.name,
        run=Path(wish.settings.folder),
        num_hosts=wish.settings.hosts,
        ranks_per_host=wish.ranks_per_host,
        arguments=wish.arguments(settings_file),
        can_resume=wish.verb == "train",
        gpus_per_host=wish.gpus_per_host,
        options=wishes.pairs(),
        rendezvous=wishes.rendezvous,
        interface=wish.interface,
    )
