"""Several runs of the same code, side by side: each stops where the others have to come too.

The forward of every microbatch is the user's own code, and calls its blocks when it likes. To take all microbatches through one
block before the next, each runs in a thread of its own and pauses before every block; only one thread runs at a time, in the
order of microbatches, so that the result does not depend on threads. The threads stay from one step to the next: libraries of a
device keep what they have prepared by thread, and would prepare it again in every step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from meshwright.runtime._torch import _get_current_dispatch_mode_stack, _get_current_function_mode_stack

T = TypeVar("T")


class Cancelled(BaseException):
    """Another run has failed. No Exception: user code must not catch it."""


class Lockstep:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._own = threading.local()
        self._runners: list[_Runner] = []

    def run(self, parts: Sequence[Callable[[], T]]) -> list[T]:
        """What each returned; the first error any of them raised."""
        if len(parts) == 1:
            return [parts[0]()]
        context = _like_this_thread(self.device)
        self._runners += [_Runner(self._own) for _ in parts[len(self._runners) :]]
        runners = self._runners[: len(parts)]
        for runner, part in zip(runners, parts, strict=True):
            runner.begin(part, context)
        try:
            while not all(runner.is_done for runner in runners):
                for runner in runners:
                    runner.go_on()
        finally:
            for runner in runners:
                runner.cancel()
        return [runner.value for runner in runners]

    def pause(self) -> None:
        """Until it is this run's turn again."""
        runner: _Runner | None = getattr(self._own, "runner", None)
        if runner is not None:
            runner.pause()

    def close(self) -> None:
        """End the threads."""
        for runner in self._runners:
            runner.close()
        self._runners = []


class _Runner:
    """A thread that does one part after the other, each only when it is its turn."""

    def __init__(self, own: Any) -> None:
        """own: where the thread finds its runner."""
        self.is_done = True
        self.value: Any = None
        self._part: Callable[[], Any] | None = None
        self._context: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._is_cancelled = False
        self._error: BaseException | None = None
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work, args=(own,), name="microbatch", daemon=True)
        self._thread.start()

    def begin(self, part: Callable[[], Any], context: Callable[[], AbstractContextManager[Any]]) -> None:
        """It runs from the next `go_on` on."""
        self._part, self._context = part, context
        self.is_done = self._is_cancelled = False
        self.value = self._error = None

    def go_on(self) -> None:
        if self.is_done:
            return
        self._turn.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        self._back.release()
        self._turn.acquire()
        if self._is_cancelled:
            raise Cancelled

    def cancel(self) -> None:
        """Until its part has ended, if need be half done."""
        if not self.is_done:
            self._is_cancelled = True
            self._turn.release()
            self._back.acquire()
        self._error = None

    def close(self) -> None:
        self._part = None
        self._turn.release()
        self._thread.join()

    def _work(self, own: Any) -> None:
        own.runner = self
        self._turn.acquire()
        while self._part is not None:
            part, self._part = self._part, None
            self._run(part)
            del part  # it holds the step's tensors
            self.is_done = True
            self._back.release()
            self._turn.acquire()

    def _run(self, part: Callable[[], Any]) -> None:
        try:
            if not self._is_cancelled:
                with self._context():
                    self.value = part()
        except BaseException as error:  # it is raised again where the others are waited for
            self._error = error


def _like_this_thread(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Gradients on or off, modes (a recorder's among them), device and stream: a thread has its own."""
    gradients = torch.is_grad_enabled()
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextmanager
    def like() -> Iterator[None]:
        with ExitStack() as stack:
            if stream is not None:
                torch.cuda.set_device(device)
                stack.enter_context(torch.cuda.stream(stream))
            for mode in modes:
                stack.enter_context(mode)
            stack.enter_context(torch.set_grad_enabled(gradients))
            yield

    return like
