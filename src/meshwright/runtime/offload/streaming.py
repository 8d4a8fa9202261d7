"""Layer streaming: parameters live on the host, a window of blocks is on the device, whatever the depth.

    forward    every microbatch through block i before any goes on to i + 1 (`lockstep.py`), while i + 1 comes in; only the
               input of each block is kept (`stash.py`)
    loss       backward from it at once, to the last block's results: its graph is gone before the next microbatch's is made
    backward   blocks in reverse order, each run again from its input for every microbatch, while i - 1 comes in; its gradients
               leave as its last microbatch ends, and the host updates it (`host_updates.py`)

A block crosses the link to the device twice a step, its gradients once to the host; per block and step on the device: a window of
blocks, two lanes of gradients, the inputs of a block on their way. Without gradients a forward only passes through the window:
that is inference of a model that is larger than its device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import ModelError
from meshwright.runtime._torch import around_calls
from meshwright.runtime.dropped import Dropped
from meshwright.runtime.offload.block_call import Tape
from meshwright.runtime.offload.block_home import BlockHome
from meshwright.runtime.offload.departures import Departures
from meshwright.runtime.offload.host_updates import HostUpdates
from meshwright.runtime.offload.link import Link
from meshwright.runtime.offload.lockstep import Lockstep
from meshwright.runtime.offload.only_returned import Made, OnlyReturned
from meshwright.runtime.offload.resident import Resident
from meshwright.runtime.offload.stash import HostStash, Stash
from meshwright.runtime.offload.window import Window
from meshwright.runtime.read_outside import STREAMED, ReadOutside
from meshwright.runtime.side_effects import SideEffects
from meshwright.runtime.synced_buffers import SyncedBuffers
from meshwright.runtime.watch import Watch

REQUESTED_AHEAD = 2
"""Calls whose inputs are on their way back while one runs."""


@dataclass(frozen=True)
class Holdings:
    """Bytes that streaming holds."""

    window: int
    lanes: int
    resident: int
    stash_peak: int
    """On the device, of inputs that leave or come back; none where the stash is the device."""
    host: int

    @property
    def device(self) -> int:
        return self.window + self.lanes + self.resident + self.stash_peak


class Streaming:
    def __init__(
        self,
        module: nn.Module,
        homes: dict[str, BlockHome],
        resident: Resident,
        window: Window,
        link: Link,
        device: torch.device,
    ) -> None:
        self.module, self.homes, self.resident, self.window, self.link, self.device = (
            module,
            homes,
            resident,
            window,
            link,
            device,
        )
        self.order = list(homes)
        self.lockstep = Lockstep(device)
        self.dropped = {name: Dropped(module.get_submodule(name)) for name in homes}
        self.effects = {name: SideEffects(module.get_submodule(name), name, writes_parameters=False) for name in homes}
        self.buffers: dict[str, SyncedBuffers] = {}
        """Of each block, where dp ranks have their own samples."""
        if window.group is not None:
            self.buffers = {name: SyncedBuffers(module.get_submodule(name), window.group) for name in homes}
        self.dropped_sums: Tensor | None = None
        self._tapes: list[Tape] = []
        self._looks: list[OnlyReturned] = []
        self._turn = 0
        for name in homes:
            around_calls(module.get_submodule(name), partial(partial, self._call, name))

    # ------------------------------------------------------------ forward

    def forward(self, parts: Sequence[Callable[[], Any]], stash: Stash, looks: bool) -> list[Tape]:
        """Run the forward (and the loss) of every microbatch; the tapes that backward needs. looks: whether what the model reads
        outside of its blocks is looked at, function by function."""
        tapes = [Tape(stash, self.device) for _ in parts]
        made: Made = {}
        self._tapes, self._looks = tapes, [OnlyReturned(made) for _ in parts] if looks else []
        try:
            self.lockstep.run([partial(self._run_part, number, part) for number, part in enumerate(parts)])
        finally:
            self._tapes, self._looks = [], []
        return tapes

    def _run_part(self, number: int, part: Callable[[], Any]) -> None:
        self._turn = number
        if not self._looks:
            part()
            return
        with ReadOutside(self.names_at_home(), STREAMED), self._looks[number]:
            part()

    def _call(self, name: str, forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        place = self.order.index(name)
        following = self.order[place + 1 : place + len(self.window.slots)]
        if not torch.is_grad_enabled() or not self._tapes:
            self.window.enter(name, following or self.order[:1])
            return forward(*arguments, **options)
        number = self._turn
        self.lockstep.pause()
        self._turn = number
        self.window.enter(name, following)
        buffers = self.buffers.get(name)
        if buffers is not None:
            buffers.before_forward()
        look = self._looks[number] if self._looks else None
        if look is not None:
            look.begin(name, (arguments, options))
        result = self._tapes[number].run(name, self._unwritten(name, forward), arguments, options, self.effects[name])
        if look is not None:
            look.end(result)
        if buffers is not None:
            buffers.after_forward()
        if self.dropped_sums is not None:
            self.dropped[name].add_to(self.dropped_sums)
        return result

    def _unwritten(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block computes with a copy of its parameters: what it writes to it would be lost."""

        def run(*arguments: Any, **options: Any) -> Any:
            before = [one._version for one in self.window.parameters]
            result = forward(*arguments, **options)
            if before != [one._version for one in self.window.parameters]:
                raise ModelError(
                    f"block '{name}' writes to a parameter of its own in forward, and streamed parameters live on the host: make "
                    "it a buffer, or keep parameters on the device (offload none or optimizer)"
                )
            return result

        return run

    # ------------------------------------------------------------ backward

    def backward(self, tapes: list[Tape], departures: Departures, updates: HostUpdates, watch: Watch) -> None:
        names = self._names(tapes)
        calls = [[tape.calls[place] for tape in tapes] for place in range(len(names))]
        waiting = [call for same in reversed(calls) for call in same]
        done = 0
        for place in reversed(range(len(names))):
            name = names[place]
            self.window.enter(name, names[max(0, place - len(self.window.slots)) : place][::-1])
            departures.begin()
            for call in calls[place]:
                for soon in waiting[done : done + 1 + REQUESTED_AHEAD]:
                    soon.request()
                with watch.region("recompute"):
                    call.backward()
                departures.add(self.homes[name], self.window.parameters)
                done += 1
            self.window.leave()  # before its update begins: hooks of the optimizer find the masters in the module
            self.window.forget(name)
            departures.send(self.homes[name], updates)

    def _names(self, tapes: list[Tape]) -> list[str]:
        names = [[call.name for call in tape.calls] for tape in tapes]
        if any(found != names[0] for found in names):
            raise ModelError(
                "microbatches call the blocks in different orders, and could not go through them side by side: let the forward "
                "take one way for all batches of a shape, or set num_microbatches to 1"
            )
        twice = next((name for name, count in Counter(names[0]).items() if count > 1), None)
        if twice is not None:
            raise ModelError(
                f"block '{twice}' is called more than once in a forward, and its gradients would leave before they are whole: "
                "keep its parameters on the device (offload none or optimizer)"
            )
        return names[0]

    # ------------------------------------------------------------ state

    def names_at_home(self) -> dict[int, str]:
        """Of parameters that are on the host while their block does not run, by identity."""
        return {
            id(master): member.names[0]
            for home in self.homes.values()
            for member, master in zip(home.members, home.masters, strict=True)
        }

    def close(self) -> None:
        self.lockstep.close()
        self.link.close()

    def give_up(self) -> None:
        """After an error: blocks compute with nothing that is half there."""
        self.window.forget_all()

    def refresh(self) -> None:
        """Parameters were loaded."""
        self.window.forget_all()
        for home in self.homes.values():
            home.refresh()
        self.resident.refresh()

    def holdings(self, departures: Departures | None, stash: Stash | None, host_bytes: int) -> Holdings:
        return Holdings(
            window=self.window.num_bytes,
            lanes=0 if departures is None else departures.num_bytes,
            resident=self.resident.num_bytes,
            stash_peak=stash.peak_device_bytes if isinstance(stash, HostStash) else 0,
            host=host_bytes + (0 if stash is None else stash.host_bytes),
        )
