"""A model without its random parts: for as long as `silence` lasts, every draw gives the mean of what it draws from.

Two runs that cut a model's work differently cannot draw alike, so a comparison must not draw at all. Dropout passes its input
on, noise is its mean, a mask that is drawn with probability p is p. What is made does not depend on a tensor's place in the
whole: it is the same on a rank's part, in a microbatch and in one process.

    x ~ U(a, b) → (a + b) / 2       x ~ N(μ, σ) → μ       mask ~ Bernoulli(p) → p       dropout(x) → x       randperm(n) → 0 … n - 1

A mode of torch functions sees the calls of forward; functions that draw inside themselves get a probability of 0. Modules that
hand their probability to a kernel, as LSTMs do, are told 0 before they run (`silence_modules`). Python's and NumPy's own
generators draw likewise while the mode lasts (models/python_draws.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.models.python_draws import between, python_silent

DROPOUTS = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_, torch.feature_dropout, torch.feature_dropout_,
    torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
)  # fmt: skip
"""Take (input, p, training)."""
DROPOUT_MODULES = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
TOLD = {F.scaled_dot_product_attention: ("dropout_p", 4), F.multi_head_attention_forward: ("dropout_p", 10)}
"""Functions that draw inside → the name and the place of their probability."""
StandIn = Callable[..., Any]


@contextmanager
def silence(found: set[str] | None = None) -> Iterator[None]:
    """found: gets the names of the functions that would have drawn."""
    with python_silent(set() if found is None else found), _Silence(found):
        yield


def silence_modules(module: nn.Module) -> set[str]:
    """Set the probabilities of a module's own parts to zero; returns the classes of those that would have drawn."""
    found = set()
    for part in module.modules():
        name = next((name for name in ("p", "dropout") if _draws(part, name)), None)
        if name is not None:
            setattr(part, name, 0.0)
            found.add(f"nn.{type(part).__name__}")
    return found


def _draws(part: nn.Module, name: str) -> bool:
    known = DROPOUT_MODULES if name == "p" else (nn.RNNBase, nn.MultiheadAttention)
    value = getattr(part, name, None)
    return isinstance(part, known) and isinstance(value, float | int) and value > 0


class _Silence(TorchFunctionMode):
    def __init__(self, found: set[str] | None) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = dict(options or {})
        if function in TOLD:
            arguments, options = self._told(function, arguments, options)
        elif function in STAND_INS:
            if function not in DROPOUTS or _is_dropping(*arguments[1:3], **options):
                self._note(function)
            options.pop("generator", None)
            return STAND_INS[function](*arguments, **options)
        return function(*arguments, **options)

    def _told(self, function: Any, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        name, place = TOLD[function]
        given = arguments[place] if len(arguments) > place else options.get(name, 0.0)
        if not given:
            return arguments, options
        self._note(function)
        if len(arguments) > place:
            return (*arguments[:place], 0.0, *arguments[place + 1 :]), options
        return arguments, {**options, name: 0.0}

    def _note(self, function: Any) -> None:
        if self.found is not None:
            self.found.add(function.__name__)


def _is_dropping(p: float = 0.5, training: bool = True, **options: Any) -> bool:
    return bool(options.get("train", training)) and p > 0


# -------------------------------------------------------------------- what stands in for a draw


def _same(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return tensor


def _native_dropout(tensor: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return tensor, torch.ones_like(tensor, dtype=torch.bool)


def _new(value: float) -> StandIn:
    """Of torch.rand and torch.randn: sizes in a row, or as one."""

    def make(*size: Any, **options: Any) -> Tensor:
        given = options.pop("size", size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        return torch.full(tuple(given), value, **{"dtype": torch.get_default_dtype(), **options})

    return make


def _like(value: float) -> StandIn:
    return lambda tensor, **options: torch.full_like(tensor, value, **options)


def _randint(*arguments: Any, **options: Any) -> Tensor:
    low, high = options.pop("low", None), options.pop("high", None)
    size = options.pop("size", None)
    given = list(arguments)
    if size is None:
        size = given.pop()
    bounds = [bound for bound in (low, *given, high) if bound is not None]
    return torch.full(tuple(size), between(*bounds), **{"dtype": torch.int64, **options})


def _randint_like(tensor: Tensor, *bounds: Any, **options: Any) -> Tensor:
    given = [*bounds, *(options.pop(name) for name in ("low", "high") if name in options)]
    return torch.full_like(tensor, between(*given), **options)


def _randperm(n: int, **options: Any) -> Tensor:
    return torch.arange(n, **options)


def _normal(mean: Any, std: Any = 1.0, size: Any = None, **options: Any) -> Tensor:
    if size is not None:
        return torch.full(tuple(size), mean, **{"dtype": torch.get_default_dtype(), **options})
    whole = mean if isinstance(mean, Tensor) else torch.full_like(std, mean)
    return (whole + torch.zeros_like(std) if isinstance(std, Tensor) else whole).clone()


def _bernoulli(tensor: Tensor, p: Any = None, **_: Any) -> Tensor:
    return tensor.clone() if p is None else torch.full_like(tensor, p)


def _bernoulli_(tensor: Tensor, p: Any = 0.5, **_: Any) -> Tensor:
    values = torch.as_tensor(p)
    return tensor.copy_(values if tensor.is_floating_point() else values >= 0.5)


def _filled(mean: Callable[..., float]) -> StandIn:
    """A method that fills a tensor; mean: of what it would have drawn, from the method's own arguments."""
    return lambda tensor, *arguments, **options: tensor.fill_(mean(*arguments, **options))


def _random_mean(*bounds: Any, **options: Any) -> int:
    given = [*bounds, *(options[name] for name in ("from", "to") if options.get(name) is not None)]
    return between(*given) if given else 0


def _multinomial(weights: Tensor, num_samples: int, replacement: bool = False, **_: Any) -> Tensor:
    if replacement:
        return weights.argmax(-1, keepdim=True).expand(*weights.shape[:-1], num_samples).clone()
    return weights.topk(num_samples, dim=-1).indices


def _rrelu(
    tensor: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, *_: Any, **__: Any
) -> Tensor:
    return F.leaky_relu(tensor, (lower + upper) / 2)


def _gumbel_softmax(logits: Tensor, tau: float = 1.0, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Tensor:
    soft = F.softmax(logits / tau, dim)
    if not hard:
        return soft
    chosen = torch.zeros_like(logits).scatter(dim, soft.argmax(dim, keepdim=True), 1.0)
    return chosen - soft.detach() + soft


STAND_INS: dict[Any, StandIn] = {
    **dict.fromkeys(DROPOUTS, _same),
    torch.native_dropout: _native_dropout,
    torch.rand: _new(0.5),
    torch.randn: _new(0.0),
    torch.rand_like: _like(0.5),
    torch.randn_like: _like(0.0),
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.randperm: _randperm,
    torch.normal: _normal,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
    torch.poisson: lambda rates, **_: rates.clone(),
    torch.binomial: lambda count, prob, **_: count * prob,
    torch.multinomial: _multinomial,
    Tensor.multinomial: _multinomial,
    **dict.fromkeys((F.rrelu, torch.rrelu, torch.rrelu_), _rrelu),
    F.gumbel_softmax: _gumbel_softmax,
    **dict.fromkeys((Tensor.uniform_, nn.init.uniform_), _filled(lambda a=0.0, b=1.0, **_: (a + b) / 2)),
    **dict.fromkeys((Tensor.normal_, nn.init.normal_, nn.init.trunc_normal_), _filled(lambda mean=0.0, *_, **__: mean)),
    Tensor.exponential_: _filled(lambda lambd=1.0, **_: 1 / lambd),
    Tensor.geometric_: _filled(lambda p, **_: 1 / p),
    Tensor.cauchy_: _filled(lambda median=0.0, *_, **__: median),
    Tensor.log_normal_: _filled(lambda mean=1.0, std=2.0, **_: math.exp(mean)),
    Tensor.random_: _filled(_random_mean),
}
