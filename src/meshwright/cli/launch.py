"""`meshwright launch`: the same run on the hosts of a SLURM or Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pathlib import Path

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
        from meshwright.training.folder import RunFolder

        return RunFolder(self.settings.folder).launch

    def arguments(self, file: Path) -> tuple[str, ...]:
        """Of `meshwright`, on every rank. file: where the settings are."""
        settings = self.settings
        devices = ("--device", settings.device, "--backend", settings.backend)
        if self.verb == "train":
            return ("train", str(file), *self.flags)
        if self.verb == "probe":
            return ("probe", *devices, "--output", str(file.with_suffix(".cluster.json")), *self.flags)
        return ("doctor", *devices, *self.flags)


def launch(
    file: Annotated[str, typer.Argument(metavar="FILE.toml")],
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="[-- FLAGS...]", help="Handed to the verb on every rank.")
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Write a file for sbatch, and submit it.")] = False,
    ray: Annotated[bool, typer.Option("--ray", help="Run on a Ray cluster, and wait for the end.")] = False,
    verb: Annotated[str, typer.Option("--verb", help="What the ranks run: train, probe or doctor.")] = "train",
    hosts: Annotated[int | None, typer.Option("--hosts", min=1, help="Default: as the file says.")] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Ranks of a host. Default: as the file says, or one a GPU.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=0, help='GPUs of a host. Default: one a rank where device = "cuda".')
    ] = None,
    interface: Annotated[
        str | None, typer.Option("--interface", help="Network interface of gloo and NCCL, like ib0. Default: theirs.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="SLURM: print the file; write and submit nothing.")
    ] = False,
    partition: Annotated[str | None, typer.Option("--partition", help="SLURM.")] = None,
    time: Annotated[str | None, typer.Option("--time", help="SLURM: limit of the job, like 12:00:00.")] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="NAME=VALUE", help="SLURM: any other option of sbatch, like qos=high."),
    ] = None,
    rendezvous: Annotated[
        str | None, typer.Option("--rendezvous", help="SLURM: address of the first host. Default: its name.")
    ] = None,
    address: Annotated[
        str | None, typer.Option("--address", help="Ray: of the cluster. Default: one that runs here, or a new one.")
    ] = None,
) -> None:
    """Run FILE.toml on several hosts: every rank reads the same settings, and writes into the same run folder.

    \b
      meshwright launch FILE.toml --slurm --hosts 4 --nproc 8 --partition gpu --time 12:00:00
      meshwright launch FILE.toml --slurm --dry-run              print the file for sbatch
      meshwright launch FILE.toml --ray --hosts 2 --nproc 8      on a Ray cluster
      meshwright launch FILE.toml --slurm --verb probe           measure the hosts and the links between them
      meshwright launch FILE.toml --slurm -- --zero 3            flags of train
    The hosts must share the folder this is started in. torchrun needs no launch: torchrun … -m meshwright train FILE.toml
    """
    from meshwright.core.errors import InputError
    from meshwright.jobs.output import make_console

    if slurm == ray:
        raise InputError("say where: --slurm or --ray; on this machine alone, `meshwright train` starts its own ranks")
    wish = _read(file, verb, tuple(flags or ()), hosts, nproc, gpus, interface)
    console = make_console(as_json=False)
    others = {"--partition": partition, "--time": time, "--sbatch": sbatch, "--rendezvous": rendezvous}
    if ray:
        from meshwright.cli.launch_ray import run_on_ray

        _refuse({**others, "--dry-run": dry_run}, "--slurm")
        run_on_ray(wish, address, console)
        return
    from meshwright.cli.launch_slurm import Wishes, submit_to_slurm

    _refuse({"--address": address}, "--ray")
    submit_to_slurm(wish, Wishes(partition, time, tuple(sbatch or ()), rendezvous), dry_run, console)


def _read(
    file: str,
    verb: str,
    flags: tuple[str, ...],
    hosts: int | None,
    nproc: int | None,
    gpus: int | None,
    interface: str | None,
) -> Launch:
    """The settings file, with what the command line says about hosts put over it."""
    from pathlib import Path

    import msgspec

    from meshwright.core.errors import InputError, check_choice
    from meshwright.jobs.settings import load_settings
    from meshwright.training.folder import RunFolder

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


def _refuse(flags: dict[str, object], home: str) -> None:
    """Flags of the other kind of cluster."""
    from meshwright.core.errors import InputError

    for name, value in flags.items():
        if value:
            raise InputError(f"{name} goes with {home}: leave it out")
