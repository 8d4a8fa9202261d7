"""`meshwright launch`: the same run on the hosts of a SLURM or Ray cluster."""

from __future__ import annotations

import os
from typing import Annotated, Any

from typer import Argument, Option

from meshwright.core.errors import InputError
from meshwright.jobs.launching import read_launch, run_on_ray, sbatch_options, submit_to_slurm
from meshwright.jobs.output import make_console
from meshwright.runtime.rank import leave


def launch(
    file: Annotated[str, Argument(metavar="FILE.toml")],
    flags: Annotated[
        list[str] | None, Argument(metavar="[-- FLAGS...]", help="Handed to the verb on every rank.")
    ] = None,
    slurm: Annotated[bool, Option("--slurm", help="Write a file for sbatch, and submit it.")] = False,
    ray: Annotated[bool, Option("--ray", help="Run on a Ray cluster, and wait for the end.")] = False,
    verb: Annotated[str, Option(help="What the ranks run: train, probe or doctor.")] = "train",
    hosts: Annotated[int | None, Option(min=1, help="Default: as the file says.")] = None,
    nproc: Annotated[
        int | None, Option(min=1, help="Ranks of a host. Default: as the file says, or one a GPU.")
    ] = None,
    gpus: Annotated[
        int | None, Option(min=0, help='GPUs of a host. Default: one a rank where device = "cuda".')
    ] = None,
    interface: Annotated[
        str | None, Option(help="Network interface of gloo and NCCL, like ib0. Default: theirs.")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="SLURM: print the file; write and submit nothing.")] = False,
    partition: Annotated[str | None, Option(help="SLURM.")] = None,
    time: Annotated[str | None, Option(help="SLURM: limit of the job, like 12:00:00.")] = None,
    sbatch: Annotated[
        list[str] | None, Option(metavar="NAME=VALUE", help="SLURM: any other option of sbatch, like qos=high.")
    ] = None,
    rendezvous: Annotated[str | None, Option(help="SLURM: address of the first host. Default: its name.")] = None,
    address: Annotated[
        str | None, Option(help="Ray: of the cluster. Default: one that runs here, or a new one.")
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
    if slurm == ray:
        raise InputError("say where: --slurm or --ray; on this machine alone, `meshwright train` starts its own ranks")
    wish = read_launch(file, verb, tuple(flags or ()), hosts, nproc, gpus, interface)
    console = make_console(as_json=False)
    others = {"--partition": partition, "--time": time, "--sbatch": sbatch, "--rendezvous": rendezvous}
    if ray:
        _refuse({**others, "--dry-run": dry_run}, "--slurm")
        run_on_ray(wish, address, console, "meshwright.cli.launch:run_verb")
        return
    _refuse({"--address": address}, "--ray")
    submit_to_slurm(wish, sbatch_options(partition, time, tuple(sbatch or ())), rendezvous, dry_run, console)


def _refuse(flags: dict[str, object], home: str) -> None:
    """Flags of the other kind of cluster."""
    for name, value in flags.items():
        if value:
            raise InputError(f"{name} goes with {home}: leave it out")


def run_verb(payload: dict[str, Any]) -> None:
    """Runs a verb of the command line on each rank of Ray, as under torchrun."""
    from meshwright.cli.app import app

    os.chdir(payload["folder"])
    code = app(args=list(payload["arguments"]), standalone_mode=False)
    if isinstance(code, int):
        leave(code)
