"""Where metrics are plotted while a run goes on: TensorBoard, where it is installed, and Weights & Biases, where it is asked for.

Weights & Biases is off unless the settings say otherwise: it sends what a run does to a server. A run that is resumed is a new run
there, in the same group: what was sent of steps that are done again cannot be taken back.
"""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from meshwright.core.errors import InputError, RunError
from meshwright.training.folder import RunFolder

if TYPE_CHECKING:
    from meshwright.training.settings import Settings

PROJECT = "meshwright"
"""Of runs whose owner named none (WANDB_PROJECT)."""


class Board(Protocol):
    def show(self, step: int, values: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def open_boards(settings: Settings, folder: RunFolder, first_step: int) -> list[Board]:
    """Those the settings ask for; the first rank's."""
    check_boards(settings)
    boards: list[Board] = []
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is not None:
        boards.append(TensorBoard(folder, first_step))
    if settings.wandb != "off":
        boards.append(WeightsAndBiases(settings, folder))
    return boards


def check_boards(settings: Settings) -> None:
    if settings.wandb != "off" and importlib.util.find_spec("wandb") is None:
        raise InputError(
            f'wandb = "{settings.wandb}", but Weights & Biases is not installed: pip install wandb, or set wandb = "off"; '
            "metrics.jsonl has every figure either way"
        )


class TensorBoard:
    """Event files in the run folder."""

    def __init__(self, folder: RunFolder, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder.tensorboard), purge_step=first_step)

    def show(self, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run there, with all settings; offline it stays in the run folder, for `wandb sync`."""

    def __init__(self, settings: Settings, folder: RunFolder) -> None:
        import os

        import wandb

        self.errors = (wandb.Error, OSError)
        try:
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                group=settings.name,
                name=folder.path.name,
                dir=str(folder.path),
                config=msgspec.to_builtins(settings),
                mode="offline" if settings.wandb == "offline" else None,
                settings=wandb.Settings(console="off", silent=True),
            )
        except self.errors as error:
            raise RunError(
                f'Weights & Biases did not start: {error}; log in with `wandb login`, set wandb = "offline" to send the run '
                'later, or "off"'
            ) from error

    def show(self, step: int, values: dict[str, Any]) -> None:
        """By step, though several calls may be of one: a validation follows the step it is of."""
        with suppress(*self.errors):
            self.run.log(values, step=step)

    def close(self) -> None:
        with suppress(*self.errors):
            self.run.finish()
