"""What Python's and NumPy's own generators draw, replaced by the mean of it: a forward that draws its way (LayerDrop by
`random.random()`) takes the same one each time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy


@contextmanager
def python_silent(found: set[str]) -> Iterator[None]:
    """found: gets the names of the functions that would have drawn."""
    with ExitStack() as stack:
        for module, name, stand_in in _of_python(found):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, stand_in)
        yield


def between(*bounds: Any) -> int:
    """The middle of [0, high) or [low, high)."""
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    return int((low + high - 1) // 2)


PYTHON: dict[str, Callable[..., Any]] = {
    "random": lambda: 0.5,
    "uniform": lambda a, b: (a + b) / 2,
    "gauss": lambda mu=0.0, sigma=1.0: mu,
    "normalvariate": lambda mu=0.0, sigma=1.0: mu,
    "randint": lambda a, b: (a + b) // 2,
    "randrange": lambda start, stop=None, step=1: start if stop is not None else start // 2,
    "choice": lambda items: items[0],
    "sample": lambda items, k, **_: list(items)[:k],
    "shuffle": lambda items: None,
}


def _sized(mean: Callable[..., float], num_bounds: int) -> Callable[..., Any]:
    """A function of numpy.random: what the draw depends on, then its size."""

    def make(*arguments: Any, size: Any = None, **options: Any) -> Any:
        bounds, given = arguments[:num_bounds], arguments[num_bounds:]
        shape = size if size is not None else (given[0] if given else None)
        value = mean(*bounds, **options)
        return value if shape is None else numpy.full(shape, value)

    return make


def _by_dims(value: float) -> Callable[..., Any]:
    def make(*dims: int) -> Any:
        return numpy.full(dims, value) if dims else value

    return make


def _choice(items: Any, size: Any = None, *_: Any, **__: Any) -> Any:
    pool = numpy.arange(items) if isinstance(items, int) else numpy.asarray(items)
    return pool[0] if size is None else numpy.resize(pool, size)


NUMPY: dict[str, Callable[..., Any]] = {
    "rand": _by_dims(0.5),
    "randn": _by_dims(0.0),
    **dict.fromkeys(("random", "random_sample"), _sized(lambda: 0.5, 0)),
    "standard_normal": _sized(lambda: 0.0, 0),
    "uniform": _sized(lambda low=0.0, high=1.0: (low + high) / 2, 2),
    "normal": _sized(lambda loc=0.0, scale=1.0: loc, 2),
    "beta": _sized(lambda a, b: a / (a + b), 2),
    "randint": _sized(lambda low, high=None, **_: between(low, high) if high is not None else between(low), 2),
    "choice": _choice,
}


def _of_python(found: set[str]) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    for module, table in ((random, PYTHON), (numpy.random, NUMPY)):
        for name, stand_in in table.items():
            yield module, name, _noting(stand_in, f"{module.__name__}.{name}", found)


def _noting(stand_in: Callable[..., Any], name: str, found: set[str]) -> Callable[..., Any]:
    def draw(*arguments: Any, **options: Any) -> Any:
        found.add(name)
        return stand_in(*arguments, **options)

    return draw
