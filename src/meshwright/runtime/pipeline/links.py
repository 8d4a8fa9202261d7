"""Links between neighbouring stages: tensors there, gradients back, in order.

Sends are buffered: they return at once, and what they send is kept until it has left. Nothing but order tells messages of a link
apart. The first message of a kind is preceded by a header that says shape, dtype and layout of each of its tensors, which the
receiver keeps for all later ones: under tp a rank sends its part, whose shape only the sender knows.

On NCCL what two ranks send each other over one group waits in one queue, so that each direction has a group of its own.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.core.errors import ModelError
from meshwright.runtime.split.layout import Layout, lay, layout_of

HEADER_BYTES = 1 << 16


@dataclass(frozen=True)
class Form:
    """What is known of a tensor before it arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None = None

    def empty(self, device: torch.device) -> Tensor:
        return lay(torch.empty(self.shape, dtype=self.dtype, device=device), self.layout)


def form_of(tensor: Tensor) -> Form:
    return Form(tuple(tensor.shape), tensor.dtype, layout_of(tensor))


class Links:
    """Of one coordinate to the others."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self.device = device
        self.here = mesh.get_local_rank("pp")
        down = mesh.get_group("pp")
        self.ranks = dist.get_process_group_ranks(down)
        self.over_host = device.type == "cuda" and dist.get_backend(down) == "gloo"
        """gloo sends no tensors of a GPU from rank to rank, though its collectives take them."""
        self.down, self.up = down, self._second_group(mesh, down)
        self.known: dict[Hashable, tuple[Form, ...]] = {}
        self.under_way: list[tuple[Any, Tensor, Hashable]] = []

    def send(self, coordinate: int, tensors: list[Tensor], key: Hashable, answer: Hashable = None) -> None:
        """key: names messages of one kind, at both ends. answer: names what comes back when they have arrived."""
        if not tensors:
            return
        if key not in self.known:
            self.known[key] = tuple(map(form_of, tensors))
            self._post(coordinate, _header(self.known[key], self.device))
        for tensor in tensors:
            self._post(coordinate, tensor.detach().contiguous(), answer)

    def receive(self, coordinate: int, num_tensors: int, key: Hashable) -> list[Tensor]:
        if not num_tensors:
            return []
        if key not in self.known:
            header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self.device)
            self._take(coordinate, [header])
            self.known[key] = _read(header)
        return self.receive_like(coordinate, self.known[key])

    def receive_like(self, coordinate: int, forms: tuple[Form, ...], answer: Hashable = None) -> list[Tensor]:
        """answer: what this is the answer to has left, and need not be kept."""
        tensors = [form.empty(self.device) for form in forms]
        self._take(coordinate, tensors)
        if forms and answer is not None:
            self._finish([sent for sent in self.under_way if sent[2] == answer])
            self.under_way = [sent for sent in self.under_way if sent[2] != answer]
        return tensors

    def send_like(self, coordinate: int, tensors: list[Tensor]) -> None:
        """What the other end knows the form of."""
        for tensor in tensors:
            self._post(coordinate, tensor.contiguous())

    def finish(self) -> None:
        """Wait until everything has left."""
        self._finish(self.under_way)
        self.under_way = []

    def _finish(self, sent: list[tuple[Any, Tensor, Hashable]]) -> None:
        for work, _, _ in sent:
            work.wait()

    def _post(self, coordinate: int, tensor: Tensor, answer: Hashable = None) -> None:
        leaving = tensor.cpu() if self.over_host else tensor
        work = dist.isend(leaving, self.ranks[coordinate], group=self._group(self.here, coordinate))
        self.under_way.append((work, leaving, answer))

    def _take(self, coordinate: int, tensors: list[Tensor]) -> None:
        group = self._group(coordinate, self.here)
        landing = [torch.empty_like(tensor, device="cpu") if self.over_host else tensor for tensor in tensors]
        for work in [dist.irecv(tensor, self.ranks[coordinate], group=group) for tensor in landing]:
            assert work is not None
            work.wait()
        if self.over_host:
            for tensor, arrived in zip(tensors, landing, strict=True):
                tensor.copy_(arrived)

    def _group(self, source: int, target: int) -> dist.ProcessGroup:
        return self.down if source < target else self.up

    def _second_group(self, mesh: DeviceMesh, first: dist.ProcessGroup) -> dist.ProcessGroup:
        if "nccl" not in dist.get_backend(first):
            return first
        degrees = (mesh["pp"].size(), mesh.size() // mesh["pp"].size())
        return init_device_mesh(mesh.device_type, degrees, mesh_dim_names=("pp", "rest")).get_group("pp")


def _header(forms: tuple[Form, ...], device: torch.device) -> Tensor:
    written = pickle.dumps(forms)
    if len(written) > HEADER_BYTES:
        raise ModelError(f"{len(forms)} tensors cross between two stages: cut the model at a narrower place")
    padded = written.ljust(HEADER_BYTES, b"\0")
    return torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device)


def _read(header: Tensor) -> tuple[Form, ...]:
    return tuple(pickle.loads(bytes(header.cpu().numpy())))
