"""`meshwright launch --ray`: a verb on the ranks of a Ray cluster, and what those ranks run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.cli.launch import Launch


def run_on_ray(wish: Launch, address: str | None, console: Console) -> None:
    """Start the ranks, pass on what they print, and wait for their end."""
    from pathlib import Path

    from meshwright.runtime.ray_launch import RayJob, import_ray, run_on_cluster

    import_ray()  # before anything is written
    file = wish.folder / "ray.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    wish.settings.save(file)
    job = RayJob(
        function="meshwright.cli.launch_ray:run_verb",
        payload={"arguments": wish.arguments(file), "folder": str(Path.cwd())},
        num_hosts=wish.settings.hosts,
        ranks_per_host=wish.ranks_per_host,
        gpus_per_host=wish.gpus_per_host,
        interface=wish.interface,
    )
    console.print(f"{wish.verb} on Ray: {job.num_hosts} hosts × {job.ranks_per_host} ranks", highlight=False)
    run_on_cluster(job, address)


def run_verb(payload: dict[str, Any]) -> None:
    """What each rank runs: a verb of the command line, as under torchrun."""
    import os

    from meshwright.cli.app import app
    from meshwright.runtime.rank import leave

    os.chdir(payload["folder"])
    code = app(args=list(payload["arguments"]), standalone_mode=False)
    if isinstance(code, int):
        leave(code)
