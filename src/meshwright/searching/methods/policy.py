"""A placement learned by trial: a softmax policy samples plans, and learns to sample better plans more often.

    a sample      a setting: first a mesh (methods/frames.py), then one of its microbatches, then one of its rungs of saving,
                  each drawn from a softmax over a table of logits that all settings share
                  then the end of each stage but the last, one after another: with the end e of the stage before, one of
                  the units that leave at least one for every stage behind, drawn from a softmax over its own table
    reward        R = -log(seconds of a step), minus PENALTY · log(needed / budget) where the plan does not fit
    step          θ ← θ + RATE · mean over a batch of (R - b) / σ · ∇ log π_θ(sample),  ∇ log softmax = one-hot - probabilities
    baseline      b and σ are the mean and the standard deviation of the batch's rewards; where σ is 0, nothing is learned

This is REINFORCE as used for device placement (Mirhoseini et al. 2017, 1706.04972), with tables in place of a network: a chain of
units needs no network. Settings with the same number of stages share the tables of ends. At first all settings are equally likely,
and even stages are likeliest: the logit of an end falls with its distance from the even cut, so early samples are sensible.

NUM_SAMPLES samples are drawn; a plan that is drawn again is not costed again. The generator is seeded and gives the same numbers on
every machine, so the same problem gives the same plans. `Learner` sees settings, cuts and rewards, never a model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, log
from statistics import fmean, pstdev

from meshwright.core.errors import PlanError
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan, Recompute
from meshwright.searching.methods.builder import Builder
from meshwright.searching.methods.exhaustive import no_plan
from meshwright.searching.methods.frames import frames, with_least_shares
from meshwright.searching.problem import Outcome, Problem
from meshwright.searching.space import Point

NUM_SAMPLES = 320
BATCH = 16
RATE = 1.0
PENALTY = 4.0
REFUSED_REWARD = -50.0
"""Of a cut that the model cannot be cut at: worse than any step."""
EVENNESS = 1.0
"""How much the logit of an end falls for every unit it is away from an even cut."""

Counts = tuple[int, ...]


Choice = tuple[int, ...]
"""A setting, by the numbers of its parts: mesh, microbatch, rung."""


@dataclass(frozen=True)
class Sample:
    """A setting, and how many units each stage has."""

    setting: Choice
    counts: Counts


@dataclass
class Learner:
    """The policy's tables, and how they are learned."""

    stages_of: Mapping[Choice, int]
    """Every setting → its number of stages."""
    num_units: int
    seed: int = 0
    part_logits: list[dict[int, float]] = field(init=False)
    """For every part of a setting: its possible value → logit."""
    end_logits: dict[int, list[dict[int, float]]] = field(init=False)
    """Number of stages → for each stage but the last: its possible end → logit."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.part_logits = [dict.fromkeys(sorted(set(numbers)), 0.0) for numbers in zip(*self.stages_of, strict=True)]
        self.end_logits = {count: self._even_ends(count) for count in sorted(set(self.stages_of.values()))}

    def learn(self, reward: Callable[[Sample], float], num_samples: int) -> None:
        """Draws batches of samples, and makes those with a reward above the baseline likelier."""
        for start in range(0, num_samples, BATCH):
            batch = [self.draw() for _ in range(min(BATCH, num_samples - start))]
            rewards = [reward(sample) for sample in batch]
            baseline, spread = fmean(rewards), pstdev(rewards)
            if spread > 0:
                for sample, got in zip(batch, rewards, strict=True):
                    self._follow(sample, RATE * (got - baseline) / spread / len(batch))

    def draw(self) -> Sample:
        setting: Choice = ()
        for table in self.part_logits:
            setting = (*setting, self._pick(table, self._parts(setting)))
        tables = self.end_logits[self.stages_of[setting]]
        ends = [0]
        for number, table in enumerate(tables):
            ends.append(self._pick(table, self._open(ends[-1], len(tables) - number)))
        return Sample(setting, tuple(behind - before for before, behind in pairwise((*ends, self.num_units))))

    def _follow(self, sample: Sample, step: float) -> None:
        """One step along the gradient of the sample's log-probability."""
        for place, table in enumerate(self.part_logits):
            _raise(table, self._parts(sample.setting[:place]), sample.setting[place], step)
        tables, end = self.end_logits[self.stages_of[sample.setting]], 0
        for number, table in enumerate(tables):
            choices = self._open(end, len(tables) - number)
            end += sample.counts[number]
            _raise(table, choices, end, step)

    def _parts(self, before: Choice) -> list[int]:
        """The possible values of the next part of a setting."""
        place = len(before)
        return sorted({setting[place] for setting in self.stages_of if setting[:place] == before})

    def _open(self, end_before: int, num_behind: int) -> range:
        """Where a stage may end: behind its first unit, with one left for every stage behind it."""
        return range(end_before + 1, self.num_units - num_behind + 1)

    def _pick(self, table: Mapping[int, float], choices: Sequence[int]) -> int:
        mark = self.random.random()
        for choice, share in zip(choices, softmax([table[choice] for choice in choices]), strict=True):
            mark -= share
            if mark < 0:
                return choice
        return choices[-1]

    def _even_ends(self, num_stages: int) -> list[dict[int, float]]:
        evenly = [self.num_units * (stage + 1) / num_stages for stage in range(num_stages - 1)]
        return [{end: -EVENNESS * abs(end - even) for end in range(self.num_units + 1)} for even in evenly]


def softmax(logits: Sequence[float]) -> list[float]:
    largest = max(logits)
    parts = [exp(logit - largest) for logit in logits]
    total = sum(parts)
    return [part / total for part in parts]


def _raise(table: dict[int, float], choices: Sequence[int], chosen: int, step: float) -> None:
    """One step along ∇ log softmax(table[choices])[chosen]."""
    shares = softmax([table[choice] for choice in choices])
    for choice, share in zip(choices, shares, strict=True):
        table[choice] += step * ((choice == chosen) - share)


@dataclass(frozen=True)
class Setting:
    point: Point
    rules: tuple[Recompute, ...]


class Trials:
    """Costs samples, each plan once."""

    def __init__(self, builder: Builder, settings: Mapping[Choice, Setting]) -> None:
        self.builder, self.settings = builder, settings
        self.costed: dict[Sample, tuple[Plan, Estimate] | None] = {}

    def reward(self, sample: Sample) -> float:
        if sample not in self.costed:
            self.costed[sample] = self._cost(sample)
        pair = self.costed[sample]
        return REFUSED_REWARD if pair is None else reward_of(pair[1])

    def _cost(self, sample: Sample) -> tuple[Plan, Estimate] | None:
        setting = self.settings[sample.setting]
        plan = self.builder.plan(setting.point, sample.counts, setting.rules)
        try:
            return plan, self.builder.problem.cost(plan)
        except PlanError:
            return None


def reward_of(found: Estimate) -> float:
    over = 0.0 if found.fits else log(found.needed_bytes / found.budget_bytes)
    return -log(found.step_seconds) - PENALTY * over


def policy(problem: Problem, num_samples: int = NUM_SAMPLES, seed: int = 0) -> Outcome:
    builder = Builder(problem)
    settings: dict[Choice, Setting] = {
        (place, microbatch, rung.number): Setting(frame.point(microbatch, rung), rung.rules)
        for place, frame in enumerate(frames(problem, builder))
        for microbatch in frame.microbatches
        for rung in frame.rungs
    }
    trials = Trials(builder, settings)
    stages_of = {choice: setting.point.num_stages for choice, setting in settings.items()}
    Learner(stages_of, len(problem.units), seed).learn(trials.reward, num_samples)
    costed = tuple(pair for pair in trials.costed.values() if pair is not None)
    if not costed:
        raise no_plan(problem)
    return with_least_shares(Outcome(costed, len(costed)), problem)
