"""Function modes under which a forward draws by sample.

    number drawn = f(seed, step, site, sample in the global batch)[place in the sample]

Each sample of a site has a seed of its own, and its numbers are drawn for the whole sample: what a rank holds of it, by tp or cp,
is cut out of that. So the same numbers come whatever the ranks, the microbatches and the stages, and come again in a recompute.
A draw whose size does not grow with the batch is the same for all samples. Devices of other kinds draw other numbers from a seed.

It costs one launch a sample and site where torch has one for all, and along tp and cp each rank draws for all of them; attention
that drops weights runs as plain products, since no fused kernel takes a mask of what it drops.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.errors import ModelError
from meshwright.models.seeded import seeded
from meshwright.runtime._torch import FakeTensor, FakeTensorMode, _get_current_function_mode_stack
from meshwright.runtime.draws.sites import Site, Sites

Size = tuple[int, ...]
Make = Callable[[Size, torch.Generator | None], Tensor]
"""(size, generator) → numbers."""
Along = int | None
"""The dim that holds the samples; None: the same numbers for all of them."""


@dataclass(frozen=True)
class Part:
    """What this rank holds of a tensor that lies over ranks."""

    whole: Callable[[Size], Size]
    """The size of the whole tensor, from that of the part."""
    own: Callable[[Tensor], Tensor]
    """The part, of the whole tensor."""


class Drawing(TorchFunctionMode):
    """Sees every function that draws, and answers it by `draw`."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        from meshwright.runtime.draws.functions import HOWS

        how = HOWS.get(function)
        options = options or {}
        return function(*arguments, **options) if how is None else how(self, function, arguments, options)

    def draw(self, what: str, size: Size, device: torch.device, make: Make) -> Tensor:
        """what: the function's name, for messages."""
        raise NotImplementedError

    def passes(self, tensor: Tensor) -> bool:
        """Whether the tensor is of another stage: its draw is counted, and nothing is drawn for it."""
        return False

    def refuse(self, words: str) -> ModelError:
        site = self.site()
        return ModelError(f"random numbers by sample: {site} {words}; or set random to 'rank', which draws by rank")

    def site(self) -> Site:
        raise NotImplementedError


class Learner(Drawing):
    """Notes the sizes that a forward on tensors without values draws."""

    def __init__(self, module: nn.Module, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.sites, self.fakes = Sites(module), fakes
        self.sizes: dict[Site, Size] = {}

    def draw(self, what: str, size: Size, device: torch.device, make: Make) -> Tensor:
        self.sizes[self.site()] = size
        with self.fakes:
            return make(size, None)

    def site(self) -> Site:
        return self.sites.next()


class Draws(Drawing):
    """Active while a microbatch runs forward, below the modes that split and cut."""

    def __init__(self, module: nn.Module, along: Mapping[Site, Along], seed: int) -> None:
        super().__init__()
        self.sites, self.along, self.seed = Sites(module), along, seed
        self.step = 0
        self.samples = range(0)
        self.part: Part | None = None
        self._generators: dict[torch.device, torch.Generator] = {}

    @contextmanager
    def microbatch(self, step: int, samples: range) -> Iterator[None]:
        """samples: of the global batch. Python's and numpy's generators begin anew with each step: a forward that draws its way
        goes the same one for all samples."""
        self.step, self.samples = step, samples
        self.sites.begin()
        with seeded(_mixed(self.seed, step) % 2**32), self:
            yield

    def as_now(self) -> Draws:
        """For code that will run again from here on, in backward."""
        again = copy.copy(self)
        again.sites = self.sites.as_now()
        return again

    @contextmanager
    def on_part(self, part: Part) -> Iterator[None]:
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def site(self) -> Site:
        return self.sites.next()

    def passes(self, tensor: Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            self.site()
            return True
        return False

    def draw(self, what: str, size: Size, device: torch.device, make: Make) -> Tensor:
        site = self.site()
        if site not in self.along:
            raise ModelError(
                f"random numbers by sample: {site} calls '{what}', and did not when the model was first followed: it goes another "
                "way with this batch; let it take one way, or set random to 'rank'"
            )
        along, part = self.along[site], self.part
        whole = size if part is None else part.whole(size)
        if along is None:
            made = make(whole, self._seeded(device, site, "all"))
        else:
            self._check(what, site, whole, along)
            rest = whole[:along] + whole[along + 1 :]
            made = torch.stack([make(rest, self._seeded(device, site, sample)) for sample in self.samples], along)
        return made if part is None else part.own(made)

    def _check(self, what: str, site: Site, whole: Size, along: int) -> None:
        if whole[along] != len(self.samples):
            raise ModelError(
                f"random numbers by sample: {site} calls '{what}' for {whole[along]} samples in dim {along}, and the microbatch "
                f"has {len(self.samples)}: set random to 'rank'"
            )

    def _seeded(self, device: torch.device, site: Site, sample: object) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        seed = _mixed(self.seed, self.step, site.module, site.number, sample)
        return self._generators[device].manual_seed(seed)


def active_draws() -> Draws | None:
    """Of the modes below the one that asks."""
    return next((mode for mode in _get_current_function_mode_stack() if isinstance(mode, Draws)), None)


def _mixed(*parts: object) -> int:
    """A seed of all of them: below 2**63, and as good in its lowest 32 bits, which are all that a CPU's generator looks at."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
