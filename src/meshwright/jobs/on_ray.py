"""`meshwright launch --ray`: a verb on the ranks of a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.jobs.launching import Launch


def run_on_ray(wish: Launch, address: str | None, console: Console, function: str) -> None:
    """Start the ranks, pass on what they print, and wait for their end. function: what each rank calls with its arguments."""
    from pathlib import Path

    from meshwright.runtime.ray_launch import RayJob, import_ray, run_on_cluster

    import_ray()  # before anything is written
    file = wish.folder / "ray.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    wish.settings.save(file)
    job = RayJob(
        function=function,
        payload={"arguments": wish.arguments(file), "folder": str(Path.cwd())},
        num_hosts=wish.settings.hosts,
        ranks_per_host=wish.ranks_per_host,
        gpus_per_host=wish.gpus_per_host,
        interface=wish.interface,
    )
    console.print(f"{wish.verb} on Ray: {job.num_hosts} hosts × {job.ranks_per_host} ranks", highlight=False)
    run_on_cluster(job, address)
