"""The head of a language model and its cross-entropy together, some tokens at a time: logits of all tokens never exist.

    z_t = W h_t + b          loss = Σ_t (log Σ_v exp z_tv - z_t,label) / n        n: the labels that count
    ∂loss/∂z_t = (softmax z_t - onehot label_t) / n

Both are known once z_t is: one pass over pieces of tokens makes the loss, ∂loss/∂h = ∂z W, and the sums ∂loss/∂W = Σ ∂zᵀ h
and ∂loss/∂b, and drops z. Backward only multiplies them by the gradient of the loss.                -> _PiecewiseLoss

The model stays as it is written. `postpone_logits` makes its head return *postponed logits*, which know their shape; the default
loss takes them in pieces. Whatever else is done with them (a softcap, an argmax, a loss of the user's own) makes them whole
first: the result is then the same as without.                                                           -> PostponedLogits
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.core.files.cache import use_own_compile_cache
from meshwright.core.names import is_list_item
from meshwright.rules.groups import PIECE_BYTES
from meshwright.runtime._torch import DisableTorchFunction

KNOWN_BEFOREHAND = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.shape.__get__, Tensor.ndim.__get__}  # type: ignore[attr-defined]
"""What can be asked of postponed logits without making them."""


class PostponedLogits(Tensor):
    """Logits that are not computed: the head's input and weights in their place."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    is_compiled: bool
    """Whether what happens between the products is compiled."""

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, bias: Tensor | None, is_compiled: bool = False) -> PostponedLogits:
        shape = (*hidden.shape[:-1], weight.shape[0])
        made = torch.empty(shape, dtype=hidden.dtype, device="meta").as_subclass(PostponedLogits)
        vars(made).update(hidden=hidden, weight=weight, bias=bias, is_compiled=is_compiled)
        return made

    def whole(self) -> Tensor:
        own = vars(self)
        return F.linear(own["hidden"], own["weight"], own["bias"])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function in KNOWN_BEFOREHAND:
            with DisableTorchFunction():
                return function(*arguments, **(options or {}))
        return function(
            *map(_made_whole, arguments), **{name: _made_whole(one) for name, one in (options or {}).items()}
        )


def _made_whole(value: Any) -> Any:
    if isinstance(value, PostponedLogits):
        return value.whole()
    if isinstance(value, tuple | list):
        return type(value)(map(_made_whole, value))
    return value


def find_head(module: nn.Module) -> nn.Linear | None:
    """The layer that makes logits: the one the model names, or else the widest linear layer outside the repeated blocks."""
    named = getattr(module, "get_output_embeddings", lambda: None)()
    if isinstance(named, nn.Linear):
        return named
    outside = [
        part
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and not any(is_list_item(prefix) for prefix in _prefixes(name))
    ]
    return max(outside, key=lambda part: part.out_features, default=None)


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def postpone_logits(module: nn.Module, is_compiled: bool = False) -> bool:
    """Let the head of a model return postponed logits; False where the model has none."""
    head = find_head(module)
    if head is None:
        return False
    head.forward = partial(_postponed, head, is_compiled)  # type: ignore[method-assign]
    return True


def _postponed(head: nn.Linear, is_compiled: bool, hidden: Tensor) -> Tensor:
    return PostponedLogits.of(hidden, head.weight, head.bias, is_compiled)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def cross_entropy_in_pieces(logits: PostponedLogits, labels: Tensor, ignored: int) -> Tensor:
    """Mean over the labels that count; zero where none does."""
    own = vars(logits)
    hidden, weight, bias = own["hidden"], own["weight"], own["bias"]
    kind = hidden.device.type
    lower = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    apply: Callable[..., Tensor] = _PiecewiseLoss.apply
    slopes = _compiled_slopes() if own["is_compiled"] else slopes_of
    return apply(hidden.flatten(0, -2), weight, bias, labels.flatten(), ignored, lower, slopes)


Slopes = Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]]


def slopes_of(
    logits: Tensor, labels: Tensor, counts: Tensor, num_counted: Tensor, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The loss of some tokens, summed, and its gradient by their logits over `num_counted`. The logits are used up."""
    exact = logits.to(wide)
    targets = torch.where(counts, labels, 0)[:, None]
    norms = exact.logsumexp(-1, keepdim=True)
    loss = ((norms - exact.gather(1, targets))[:, 0] * counts).sum()
    chosen = torch.arange(logits.shape[1], device=logits.device)[None, :] == targets
    slopes = exact.sub_(norms).exp_().sub_(chosen.to(torch.int8)).mul_((counts.to(wide) / num_counted)[:, None])
    return loss, slopes.to(logits.dtype)


@cache
def _compiled_slopes() -> Slopes:
    """In two passes over the logits, instead of eight."""
    use_own_compile_cache()
    return torch.compile(slopes_of, dynamic=False)


class _PiecewiseLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignored: int, lower: torch.dtype,
        slopes: Slopes,
    ) -> Tensor:  # fmt: skip
        with torch.autocast(hidden.device.type, enabled=False):
            sums = _Sums(hidden, weight, bias, lower, ctx.needs_input_grad[:3])
            num_counted = (labels != ignored).sum().clamp(min=1)
            for rows in _pieces(hidden.shape[0], weight.shape[0]):
                sums.add(rows, labels[rows], ignored, num_counted, slopes)
        ctx.gradients = sums.gradients()
        return sums.loss / num_counted

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("a loss in pieces goes backward once: its gradients are given away, not kept")
        made, ctx.gradients = ctx.gradients, None
        return (*(None if one is None else one.mul_(gradient.to(one.dtype)) for one in made), None, None, None, None)


class _Sums:
    """Loss and gradients of the pieces so far."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, lower: torch.dtype, wanted: tuple[bool, ...]
    ) -> None:
        """lower: what the product is computed in. wanted: which of hidden, weight and bias need a gradient."""
        self.sources = (hidden, weight, bias)
        self.lower = lower
        self.wide = torch.float64 if lower == torch.float64 else torch.float32
        self.weight = weight.detach().to(lower)
        self.bias = None if bias is None else bias.detach().to(lower)
        self.loss = torch.zeros((), dtype=self.wide, device=hidden.device)
        needs_hidden, needs_weight, needs_bias = wanted
        self.of_hidden = torch.empty_like(hidden) if needs_hidden else None
        self.of_weight = torch.zeros_like(weight, dtype=self.wide) if needs_weight else None
        self.of_bias = torch.zeros_like(bias, dtype=self.wide) if bias is not None and needs_bias else None

    def add(self, rows: slice, labels: Tensor, ignored: int, num_counted: Tensor, slopes_of: Slopes) -> None:
        hidden = self.sources[0][rows].detach().to(self.lower)
        logits = F.linear(hidden, self.weight, self.bias)
        if self.of_hidden is None and self.of_weight is None and self.of_bias is None:
            self.loss += F.cross_entropy(logits.to(self.wide), labels, ignore_index=ignored, reduction="sum")
            return
        loss, slopes = slopes_of(logits, labels, labels != ignored, num_counted, self.wide)
        self.loss += loss
        self._add_gradients(rows, hidden, slopes)

    def _add_gradients(self, rows: slice, hidden: Tensor, slopes: Tensor) -> None:
        if self.of_hidden is not None:
            self.of_hidden[rows] = slopes @ self.weight
        if self.of_weight is not None:
            self.of_weight += slopes.T @ hidden
        if self.of_bias is not None:
            self.of_bias += slopes.sum(0, dtype=self.wide)

    def gradients(self) -> tuple[Tensor | None, ...]:
        made = (self.of_hidden, self.of_weight, self.of_bias)
        return tuple(
            None if one is None or source is None else one.to(source.dtype)
            for one, source in zip(made, self.sources, strict=True)
        )


def _pieces(num_tokens: int, vocab: int) -> list[slice]:
    """Even pieces of tokens whose logits fit in the room for one."""
    most = max(1, PIECE_BYTES // (4 * vocab))
    size = -(-num_tokens // max(1, -(-num_tokens // most)))
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, max(size, 1))]
