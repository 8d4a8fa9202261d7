"""Several runs of the same code, side by side: each stops where the others have to come too.

The forward of every microbatch is the user's own code, and calls its blocks when it likes. To take all microbatches through one
block before the next, each runs in a thread of its own and pauses before every block; only one thread runs at a time, in the
order of microbatches, so that the result does not depend on threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Generic, TypeVar

import torch

from meshwright.runtime._torch import _get_current_function_mode_stack

T = TypeVar("T")


class Cancelled(BaseException):
    """Another run has failed. No Exception: user code must not catch it."""


class Lockstep:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._own = threading.local()

    def run(self, parts: Sequence[Callable[[], T]]) -> list[T]:
        """What each returned; the first error any of them raised."""
        if len(parts) == 1:
            return [parts[0]()]
        context = _like_this_thread(self.device)
        runs = [_Run(part, context, self._own) for part in parts]
        try:
            while not all(run.is_done for run in runs):
                for run in runs:
                    run.go_on()
        finally:
            for run in runs:
                run.cancel()
        return [run.result() for run in runs]

    def pause(self) -> None:
        """Until it is this run's turn again."""
        run: _Run[Any] | None = getattr(self._own, "run", None)
        if run is not None:
            run.pause()


class _Run(Generic[T]):
    def __init__(self, part: Callable[[], T], context: Callable[[], AbstractContextManager[Any]], own: Any) -> None:
        self.is_done = False
        self._cancelled = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work, args=(part, context, own), name="microbatch", daemon=True)
        self._thread.start()

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
        if self._cancelled:
            raise Cancelled

    def cancel(self) -> None:
        if not self.is_done:
            self._cancelled = True
            self._turn.release()
        self._thread.join()

    def result(self) -> T:
        return self._value  # type: ignore[return-value]

    def _work(self, part: Callable[[], T], context: Callable[[], AbstractContextManager[Any]], own: Any) -> None:
        self._turn.acquire()
        own.run = self
        try:
            if not self._cancelled:
                with context():
                    self._value = part()
        except BaseException as error:  # it is raised again where the others are waited for
            self._error = error
        finally:
            self.is_done = True
            self._back.release()


def _like_this_thread(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Gradients on or off, function modes, device and stream: a thread has its own."""
    gradients, modes = torch.is_grad_enabled(), _get_current_function_mode_stack()
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
