"""An integer program that is built row by row and solved by HiGHS.

    minimise  c x   subject to   low ≤ A x ≤ high,   least ≤ x ≤ most,   some x whole numbers

*Terms* are a sum of variables with factors: {variable: factor}, with a constant under CONSTANT. The limit counts nodes of the tree,
never seconds, and nothing is random: the same program has the same answer on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

Terms = dict[int, float]
CONSTANT = -1
ONE: Terms = {CONSTANT: 1.0}
NODE_LIMIT = 2000


def plus(*parts: Terms, factor: float = 1.0) -> Terms:
    """The sum of the parts, times a factor."""
    found: Terms = {}
    for part in parts:
        for variable, value in part.items():
            found[variable] = found.get(variable, 0.0) + factor * value
    return {variable: value for variable, value in found.items() if value}


def minus(one: Terms, other: Terms) -> Terms:
    return plus(one, plus(other, factor=-1.0))


@dataclass
class Program:
    costs: list[float] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)
    is_whole: list[bool] = field(default_factory=list)
    rows: list[tuple[Terms, float, float]] = field(default_factory=list)
    constant: float = 0.0
    """The part of the costs that no variable changes."""

    def variable(self, *, whole: bool = False, least: float = 0.0, most: float = 1.0) -> Terms:
        self.costs.append(0.0)
        self.least.append(least)
        self.most.append(most)
        self.is_whole.append(whole)
        return {len(self.costs) - 1: 1.0}

    def pay(self, terms: Terms, price: float) -> None:
        for variable, value in terms.items():
            if variable == CONSTANT:
                self.constant += price * value
            else:
                self.costs[variable] += price * value

    def between(self, terms: Terms, low: float, high: float) -> None:
        shift = terms.get(CONSTANT, 0.0)
        self.rows.append(({v: f for v, f in terms.items() if v != CONSTANT}, low - shift, high - shift))

    def equal(self, one: Terms, other: Terms) -> None:
        difference = minus(one, other)
        if difference:
            self.between(difference, 0.0, 0.0)

    def at_least(self, one: Terms, other: Terms) -> None:
        difference = minus(one, other)
        if difference:
            self.between(difference, 0.0, inf)

    def either(self, parts: Iterable[Terms]) -> Terms:
        """A variable y that is 1 where any part is 1, and 0 where all are 0: y ≥ each part, y ≤ their sum."""
        distinct = list({tuple(sorted(part.items())): part for part in parts if part}.values())
        if len(distinct) < 2:
            return distinct[0] if distinct else {}
        found = self.variable()
        for part in distinct:
            self.at_least(found, part)
        self.at_least(plus(*distinct), found)
        return found

    def solve(
        self, unit: float = 1.0, *, node_limit: int = NODE_LIMIT, gap: float = 0.0
    ) -> tuple[list[float], float] | None:
        """The best values of the variables that were found within the limit of nodes, and their costs; None where nothing is
        feasible. The solver gets costs in this unit, since its tolerances are absolute: 1e-6. gap: the share of the costs that the
        answer may be above the least."""
        import numpy
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        if not self.costs:
            return ([], self.constant) if all(low <= 0 <= high for _, low, high in self.rows) else None
        entries = [(row, v, f) for row, (terms, _, _) in enumerate(self.rows) for v, f in terms.items()]
        places, columns, factors = zip(*entries, strict=True) if entries else ((), (), ())
        matrix = csr_array((factors, (places, columns)), shape=(len(self.rows), len(self.costs)))
        low, high = ([row[side] for row in self.rows] for side in (1, 2))
        found = milp(
            numpy.array(self.costs) / unit,
            integrality=numpy.array(self.is_whole, dtype=int),
            bounds=Bounds(numpy.array(self.least), numpy.array(self.most)),
            constraints=[LinearConstraint(matrix, low, high)] if self.rows else [],
            options={"node_limit": node_limit, "mip_rel_gap": gap},
        )
        if found.x is None:
            return None
        values = [float(value) for value in found.x]
        return values, self.constant + sum(cost * value for cost, value in zip(self.costs, values, strict=True))


def load_solver() -> None:
    """Imports the solver, which takes a third of a second, while the caller has to wait anyway."""
    import scipy.optimize
    import scipy.sparse  # noqa: F401
