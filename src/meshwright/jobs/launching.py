"""What is launched on several hosts: a verb with its settings, on how much of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
