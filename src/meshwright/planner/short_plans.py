"""Plans by a short name, for comparing them: `ddp`, `zero3`, `tp2`, `pp2+zero1`.

one          one rank, nothing spread                  zeroN        ZeRO stage N over the ranks
ddp          replicas                                  tpN ppN cpN epN   N ranks along that axis, the others data parallel
recompute    every block is recomputed                 compile      blocks are compiled
search       what the search chooses
Words are joined by `+`. What a name leaves open stays as the settings have it.
"""

from __future__ import annotations

import re

import msgspec

from meshwright.core.codec import Value
from meshwright.core.errors import InputError, nearest
from meshwright.core.request import PlanRequest

WORDS: dict[str, dict[str, object]] = {
    "one": {"dp": 1, "tp": 1, "pp": 1, "cp": 1, "zero": 0},
    "ddp": {"zero": 0},
    "recompute": {"recompute": "full"},
    "compile": {"compile": True},
    "search": {},
    **{f"zero{stage}": {"zero": stage} for stage in range(4)},
}
_DEGREE = re.compile(r"(tp|pp|cp|ep)([1-9]\d*)")


class Contender(Value, kw_only=True):
    """A plan by its short name, on a number of ranks."""

    short: str
    num_ranks: int
    peer: str = ""
    """Another library that does what the plan does, in our place."""

    @property
    def name(self) -> str:
        return f"{self.peer or self.short} on {self.num_ranks}"

    @property
    def is_searched(self) -> bool:
        return "search" in self.short.split("+")


def parse_short(text: str) -> PlanRequest:
    """The request that a short name stands for."""
    found: dict[str, object] = {}
    for word in text.split("+"):
        for name, value in _meaning(word, text).items():
            if name in found and found[name] != value:
                raise InputError(f"plan '{text}' says two things about {name}: keep one of them")
            found[name] = value
    return msgspec.convert(found, PlanRequest)


def _meaning(word: str, text: str) -> dict[str, object]:
    if word in WORDS:
        return WORDS[word]
    match = _DEGREE.fullmatch(word)
    if match is None:
        raise InputError(f"plan '{text}': unknown word '{word}': {nearest(word, [*WORDS, 'tp2', 'pp2', 'cp2', 'ep2'])}")
    return {match[1]: int(match[2])}


def contenders(shorts: tuple[str, ...], nprocs: tuple[int, ...]) -> tuple[list[Contender], list[str]]:
    """Every plan on every number of ranks it can run on, each once; and why the others are left out.

    Whoever asks for one rank gets one: where plans are the same there, it is run as the plan 'one', before all others.
    """
    found: list[Contender] = []
    left_out = []
    same_on_one = False
    for short in dict.fromkeys(shorts):
        request = parse_short(short)
        needed = (request.tp or 1) * (request.pp or 1) * (request.cp or 1) * (request.dp or 1)
        for count in dict.fromkeys(nprocs):
            one = Contender(short=short, num_ranks=count)
            if count % needed or (short == "one" and count > 1):
                left_out.append(f"{one.name}: it runs on multiples of {needed}" if short != "one" else "")
            elif count == 1 and needed == 1 and not one.is_searched and short != "one":
                left_out.append(f"{one.name}: on one rank it is the plan 'one'")
                same_on_one = True
            else:
                found.append(one)
    if same_on_one and "one" not in shorts:
        found.insert(0, Contender(short="one", num_ranks=1))
    return found, [words for words in left_out if words]
