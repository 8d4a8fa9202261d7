"""How each function that draws is answered by numbers that a mode draws by sample.

    dropout                       x · [u ≥ p] / (1 - p)                       u uniform
    dropout of channels           one u for a channel of a sample
    scaled_dot_product_attention  dropout(softmax(q kᵀ · scale + mask)) v
    fills, new tensors            the function itself, sample by sample
    functions written in Python   followed inside

What is not here and draws is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.runtime.draws.mode import Drawing, Size
from meshwright.runtime.split.rules.arguments import Args, Options, by_name
from meshwright.runtime.split.rules.decomposed import follow_inside

How = Callable[[Drawing, Any, Args, Options], Any]
UNBATCHED = {"dropout1d": 2, "dropout3d": 4}
"""Dims of a sample without a batch dim. dropout2d takes three dims for samples, channels and places."""


def _uniform(mode: Drawing, what: str, size: Size, like: Tensor) -> Tensor:
    return mode.draw(
        what, size, like.device, lambda s, generator: torch.rand(s, generator=generator, device=like.device)
    )


def _kept(mode: Drawing, what: str, size: Size, like: Tensor, p: float) -> Tensor:
    return mode.draw(
        what, size, like.device, lambda s, generator: torch.rand(s, generator=generator, device=like.device) >= p
    )


# -------------------------------------------------------------------- dropout


def _dropping(args: Args, kwargs: Options) -> tuple[Tensor, float, bool]:
    """The tensor, and the probability; zero where nothing is drawn. Whether the tensor is changed."""
    tensor, p, training, inplace = by_name(args, kwargs, ("input", "p", "training", "inplace"))
    trains = kwargs.get("train", True if training is None else training)
    p = 0.5 if p is None else float(p)
    return tensor, p if trains and 0 < p < 1 else 0.0, bool(inplace)


def _dropped(tensor: Tensor, kept: Tensor, p: float, inplace: bool) -> Tensor:
    return tensor.mul_(kept).div_(1 - p) if inplace else tensor * kept / (1 - p)


def dropout(mode: Drawing, function: Any, args: Args, kwargs: Options) -> Any:
    tensor, p, inplace = _dropping(args, kwargs)
    if not p or mode.passes(tensor):
        return function(*args, **kwargs)
    name = function.__name__
    kept = _kept(mode, name, tuple(tensor.shape), tensor, p)
    return _dropped(tensor, kept, p, inplace or name.endswith("_"))


def dropout_of_channels(mode: Drawing, function: Any, args: Args, kwargs: Options) -> Any:
    tensor, p, inplace = _dropping(args, kwargs)
    if not p or mode.passes(tensor):
        return function(*args, **kwargs)
    name = function.__name__
    first = 1 if tensor.dim() == UNBATCHED.get(name, 0) else 2
    kept = _kept(mode, name, (*tensor.shape[:first], *(1 for _ in tensor.shape[first:])), tensor, p)
    return _dropped(tensor, kept, p, inplace or name.endswith("_"))


# -------------------------------------------------------------------- attention

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def attention(mode: Drawing, function: Any, args: Args, kwargs: Options) -> Any:
    query, key, value, mask, p, causal, scale, grouped = by_name(args, kwargs, NAMES)
    if not p or mode.passes(query):
        return function(*args, **kwargs)
    if grouped:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    kept = _kept(mode, function.__name__, tuple(weights.shape), weights, p)
    made: Tensor = _dropped(weights, kept, p, inplace=False).to(value.dtype) @ value
    return made


# -------------------------------------------------------------------- new tensors, and tensors that are filled


def _check_generator(mode: Drawing, function: Any, kwargs: Options) -> Options:
    if kwargs.get("generator") is not None:
        raise mode.refuse(f"calls '{function.__name__}' with a generator of its own: leave the generator out")
    return {name: value for name, value in kwargs.items() if name != "generator"}


def filled(mode: Drawing, function: Any, args: Args, kwargs: Options) -> Any:
    """normal_, uniform_, exponential_, …"""
    target, options = args[0], _check_generator(mode, function, kwargs)
    if any(isinstance(value, Tensor) for value in (*args[1:], *options.values())):
        raise mode.refuse(
            f"calls '{function.__name__}' by the values of a tensor: draw uniform numbers and compare them"
        )
    if mode.passes(target):
        return function(*args, **kwargs)

    def make(size: Size, generator: torch.Generator | None) -> Tensor:
        empty = torch.empty(size, dtype=target.dtype, device=target.device)
        made: Tensor = function(empty, *args[1:], generator=generator, **options)
        return made

    return target.copy_(mode.draw(function.__name__, tuple(target.shape), target.device, make))


def new(mode: Drawing, function: Any, args: Args, kwargs: Options) -> Any:
    """rand, randn: sizes in a row, or as one."""
    options = _check_generator(mode, function, kwargs)
    size = options.pop("size", args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
    return _new(mode, function, (), tuple(size), options)


def new_whole_numbers(mode: Drawing, function: Any, args: Args, kwargs: Options) -> Any:
    """randint"""
    options, given = _check_generator(mode, function, kwargs), list(args)
    size = options.pop("size") if "size" in options else given.pop()
    bounds = [options.pop(name) for name in ("low",) if name in options] + given
    bounds += [options.pop(name) for name in ("high",) if name in options]
    return _new(mode, function, tuple(bounds), tuple(size), options)


def _new(mode: Drawing, function: Any, bounds: Args, size: Size, options: Options) -> Tensor:
    device = torch.device(options.get("device") or torch.get_default_device())
    return mode.draw(
        function.__name__, size, device, lambda s, generator: function(*bounds, s, generator=generator, **options)
    )


LIKE: dict[Any, Any] = {torch.rand_like: torch.rand, torch.randn_like: torch.randn, torch.randint_like: torch.randint}


def like(mode: Drawing, function: Any, args: Args, kwargs: Options) -> Any:
    """rand_like, randn_like, randint_like"""
    options, tensor = _check_generator(mode, function, kwargs), args[0]
    if mode.passes(tensor):
        return function(*args, **kwargs)
    options.pop("memory_format", None)
    options = {"dtype": tensor.dtype, "device": tensor.device, **options}
    given = tuple(args[1:]) + tuple(options.pop(name) for name in ("low", "high") if name in options)
    return _new(mode, LIKE[function], given, tuple(tensor.shape), options)


def bernoulli(mode: Drawing, function: Any, args: Args, kwargs: Options) -> Any:
    """1 with the probability that a tensor says, or with p."""
    options, tensor = _check_generator(mode, function, kwargs), args[0]
    if mode.passes(tensor):
        return function(*args, **kwargs)
    p = args[1] if len(args) > 1 else options.get("p")
    return (_uniform(mode, "bernoulli", tuple(tensor.shape), tensor) < (tensor if p is None else p)).to(tensor.dtype)


def order(mode: Drawing, function: Any, args: Args, kwargs: Options) -> Any:
    """randperm: of things that every sample has; an order of the samples themselves is of no one of them."""
    options = _check_generator(mode, function, kwargs)
    device = torch.device(options.get("device") or torch.get_default_device())

    def make(size: Size, generator: torch.Generator | None) -> Tensor:
        if not size:
            raise mode.refuse("draws an order of samples, which other ranks and microbatches have others of")
        return torch.randperm(*size, generator=generator, **options)

    return mode.draw(function.__name__, (int(args[0]),), device, make)


def refused(mode: Drawing, function: Any, args: Args, kwargs: Options) -> Any:
    raise mode.refuse(f"calls '{function.__name__}', which cannot be drawn by sample")


def refused_where_training(mode: Drawing, function: Any, args: Args, kwargs: Options) -> Any:
    name, place = ("training", 3) if "rrelu" in function.__name__ else ("training", 2)
    default = "rrelu" not in function.__name__
    trains = kwargs.get("train", kwargs.get(name, args[place] if len(args) > place else default))
    return refused(mode, function, args, kwargs) if trains else function(*args, **kwargs)


HOWS: dict[Any, How] = {
    **dict.fromkeys((F.dropout, torch.dropout, torch.dropout_), dropout),
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout, torch.feature_dropout_), dropout_of_channels),
    F.scaled_dot_product_attention: attention,
    **dict.fromkeys((F.multi_head_attention_forward, F.gumbel_softmax), follow_inside),
    **dict.fromkeys((torch.rand, torch.randn), new),
    torch.randint: new_whole_numbers,
    **dict.fromkeys(LIKE, like),
    **dict.fromkeys((torch.bernoulli, Tensor.bernoulli), bernoulli),
    torch.randperm: order,
    **dict.fromkeys(
        (
            Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_, Tensor.geometric_, Tensor.cauchy_,
            Tensor.log_normal_, Tensor.random_,
        ),
        filled,
    ),
    **dict.fromkeys(
        (
            F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout, torch.alpha_dropout_, torch.feature_alpha_dropout,
            torch.feature_alpha_dropout_, F.rrelu, torch.rrelu, torch.rrelu_,
        ),
        refused_where_training,
    ),
    **dict.fromkeys(
        (
            torch.native_dropout, torch.normal, torch.poisson, torch.binomial, torch.multinomial, Tensor.multinomial,
            nn.init.uniform_, nn.init.normal_, nn.init.trunc_normal_,
        ),
        refused,
    ),
}  # fmt: skip
