"""What is known of a tensor before it arrives from another stage, and how one stage tells it the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.core.axes import Axis
from meshwright.core.codec import Value
from meshwright.core.errors import ModelError
from meshwright.runtime.messages.form import decode, encode
from meshwright.runtime.messages.seal import seal, unseal
from meshwright.runtime.split.layout import Addend, Cut, Layout, lay, layout_of

HEADER_BYTES = 1 << 16
PURPOSE = "the header of a message between stages"


@dataclass(frozen=True)
class Form:
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None = None

    def empty(self, device: torch.device) -> Tensor:
        return lay(torch.empty(self.shape, dtype=self.dtype, device=device), self.layout)


class SentShare(Value, kw_only=True):
    """How a tensor lies over one axis: cut, or each rank has an addend."""

    axis: Axis
    cut: Cut | None
    bias: Tensor | None


class SentForm(Value, kw_only=True):
    """Shape, dtype and layout of a tensor that is sent between stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: tuple[SentShare, ...] | None


def form_of(tensor: Tensor) -> Form:
    return Form(tuple(tensor.shape), tensor.dtype, layout_of(tensor))


def header(forms: tuple[Form, ...], device: torch.device) -> Tensor:
    sealed = seal(PURPOSE, encode(tuple(map(_sent, forms))))
    written = len(sealed).to_bytes(4, "big") + sealed
    if len(written) > HEADER_BYTES:
        raise ModelError(f"{len(forms)} tensors cross between two stages: cut the model at a narrower place")
    padded = written.ljust(HEADER_BYTES, b"\0")
    return torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device)


def read_header(found: Tensor) -> tuple[Form, ...]:
    data = found.cpu().numpy().tobytes()
    length = int.from_bytes(data[:4], "big")
    sent: tuple[SentForm, ...] = decode(unseal(PURPOSE, data[4 : 4 + length]), tuple[SentForm, ...], PURPOSE)
    return tuple(map(_form, sent))


def _sent(form: Form) -> SentForm:
    shares = None if form.layout is None else tuple(_share(axis, form.layout[axis]) for axis in form.layout)
    return SentForm(shape=form.shape, dtype=form.dtype, layout=shares)


def _share(axis: Axis, share: Cut | Addend) -> SentShare:
    if isinstance(share, Cut):
        return SentShare(axis=axis, cut=share, bias=None)
    return SentShare(axis=axis, cut=None, bias=share.bias)


def _form(sent: SentForm) -> Form:
    if sent.layout is None:
        return Form(sent.shape, sent.dtype)
    shares = {share.axis: Addend(share.bias) if share.cut is None else share.cut for share in sent.layout}
    return Form(sent.shape, sent.dtype, shares)
