"""`meshwright launch`: a verb with its settings, on the hosts of a SLURM or Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from meshwright.core.errors import InputError, check_choice
from meshwright.jobs.settings import load_settings
from meshwright.training.folder import RunFolder
from meshwright.training.settings import Settings

VERBS = ("train", "probe", "doctor")


@dataclass(frozen=True)
class Launch:
    """What is to run, on how much of a cluster."""

    settings: Settings
    """With the number of hosts, and of ranks on each (`nproc`)."""
    verb: str
    flags: tuple[str, ...]
    gpus_per_host: int
    interface: str | None

    @property
    def ranks_per_host(self) -> int:
        assert self.settings.nproc is not None
        return self.settings.nproc

    @property
    def folder(self) -> Path:
        """Of what launching leaves in the run folder."""
        return RunFolder(self.settings.folder).launch

    def arguments(self, file: Path) -> tuple[str, ...]:
        """Of `meshwright`, on every rank. file: where the settings are."""
        if self.verb == "train":
            return ("train", str(file), *self.flags)
        output = ("--output", str(file.with_suffix(".cluster.json"))) if self.verb == "probe" else ()
        return (self.verb, "--device", self.settings.device, "--backend", self.settings.backend, *output, *self.flags)

    def save_settings(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.settings.save(file)


def read_launch(
    file: str,
    verb: str,
    flags: tuple[str, ...],
    hosts: int | None,
    nproc: int | None,
    gpus: int | None,
    interface: str | None,
) -> Launch:
    """The settings file, with what the command line says about hosts put over it."""
    check_choice("--verb", verb, VERBS)
    settings = load_settings(file)
    ranks = nproc or settings.nproc or gpus
    if ranks is None:
        raise InputError(f"how many ranks a host? Give --nproc, --gpus, or nproc in {file}")
    if settings.device == "cpu" and gpus:
        raise InputError(f'--gpus {gpus}, but {file} says device = "cpu": leave one out')
    placed = msgspec.structs.replace(
        settings, hosts=hosts or settings.hosts, nproc=ranks, out=str(Path(settings.folder).absolute())
    )
    RunFolder(placed.folder).check_free()
    wanted = gpus if gpus is not None else (ranks if settings.device == "cuda" else 0)
    return Launch(placed, verb, flags, wanted, interface)


def run_on_ray(wish: Launch, address: str | None, console: Console, function: str) -> None:
    """Start the ranks, pass on what they print, and wait for their end. function: what each rank calls with its arguments."""
    from meshwright.runtime.ray_launch import RayJob, import_ray, run_on_cluster

    import_ray()  # before anything is written
    file = wish.folder / "ray.toml"
    wish.save_settings(file)
    job = RayJob(
        function=function,
        payload={"arguments": wish.arguments(file), "folder": str(Path.cwd())},
        num_hosts=wish.settings.hosts,
        ranks_per_host=wish.ranks_per_host,
        gpus_per_host=wish.gpus_per_host,
        interface=wish.interface,
    )
    console.print(f"{wish.verb} on Ray: {job.num_hosts} hosts × {job.ranks_per_host} ranks")
    run_on_cluster(job, address)


def sbatch_options(partition: str | None, time: str | None, others: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Names and values. others: as NAME=VALUE."""
    named = (("partition", partition), ("time", time))
    found = [(name, value) for name, value in named if value is not None]
    for text in others:
        name, sign, value = text.lstrip("-").partition("=")
        if not sign:
            raise InputError(f"--sbatch {text}: give an option of sbatch as NAME=VALUE, like qos=high")
        found.append((name, value))
    return tuple(found)


def submit_to_slurm(
    wish: Launch, options: tuple[tuple[str, str], ...], rendezvous: str | None, dry_run: bool, console: Console
) -> None:
    """Every launch leaves a pair of files of its own: a job that waits must not see those of a later one."""
    from meshwright.runtime.slurm import SlurmJob, batch_script, submit

    settings_file = _next_name(wish.folder)
    job = SlurmJob(
        name=wish.settings.name,
        run=Path(wish.settings.folder),
        num_hosts=wish.settings.hosts,
        ranks_per_host=wish.ranks_per_host,
        arguments=wish.arguments(settings_file),
        can_resume=wish.verb == "train",
        gpus_per_host=wish.gpus_per_host,
        options=options,
        rendezvous=rendezvous,
        interface=wish.interface,
    )
    script = batch_script(job)
    if dry_run:
        print(script, end="")
        return
    wish.save_settings(settings_file)
    script_file = settings_file.with_suffix(".sbatch")
    script_file.write_text(script, encoding="utf-8")
    console.print(f"wrote {script_file}", soft_wrap=True)
    if not wish.gpus_per_host and wish.settings.device == "auto":
        console.print('no GPUs are asked for: give --gpus N, or device = "cuda", if the ranks are to have them')
    number = submit(script_file)
    log = wish.folder / f"slurm-{number}.log"
    console.print(f"submitted as job {number}; it writes {log}", soft_wrap=True)
    console.print(f"`meshwright watch {wish.settings.folder}` shows it once it runs", soft_wrap=True)


def _next_name(folder: Path) -> Path:
    number = 1
    while (name := folder / f"job-{number}.toml").exists():
        number += 1
    return name
