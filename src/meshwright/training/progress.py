"""What a person sees while a run goes on: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meshwright.core.units import format_bytes

LINE_SECONDS = 10.0
"""Between two lines, where there is no terminal to redraw."""


class ProgressView:
    def __init__(self, console: Console, num_steps: int, first_step: int) -> None:
        self.console = console
        self.num_steps = num_steps
        self.bar = Progress(
            TextColumn("training"), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[words]}"),
            TimeRemainingColumn(), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task("train", total=num_steps, completed=first_step, words="")
        self.last_line = 0.0

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def show(self, step: int, loss: float, tokens_per_second: float, memory_bytes: int) -> None:
        words = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s  {format_bytes(memory_bytes)}"
        self.bar.update(self.task, completed=step + 1, words=words)
        now = time.monotonic()
        if not self.console.is_terminal and (now - self.last_line > LINE_SECONDS or step + 1 == self.num_steps):
            self.last_line = now
            self.console.print(f"step {step + 1}/{self.num_steps}  {words}", highlight=False)

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)
