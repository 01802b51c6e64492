"""Numbers that depend on dynamic sizes: polynomials in symbols, found from some of their values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations_with_replacement
from typing import Any

from torch import fx

from shardwise.export.errors import ExportError

Sizes = dict[Any, int]
"""A number for each symbol."""

Monomial = tuple[int, ...]
"""A product of symbols, by their places."""


@dataclass(frozen=True)
class Symbol:
    """A dynamic size of a program."""

    expression: Any
    """What the program's own metadata calls it."""
    name: str
    example: int
    lower: int
    upper: int


@dataclass(frozen=True)
class Polynomial:
    """A number of a graph that is another one at other sizes: terms, over one denominator."""

    terms: dict[Monomial, int]
    denominator: int


def monomials(count: int) -> list[Monomial]:
    """Those of so many symbols, up to degree two; the constant one first."""
    return [
        each for degree in range(3) for each in combinations_with_replacement(range(count), degree)
    ]


class NoPolynomialError(ExportError):
    """A number that is no polynomial, or a longer one than was looked for."""


class Solver:
    """Finds polynomials of degree two in the symbols.

    Arguments:
        samples: at which sizes numbers were seen.
        is_short: look only for those of a constant and one other term, with whole coefficients.
    """

    def __init__(
        self, symbols: Sequence[Symbol], samples: Sequence[Sizes], is_short: bool = False
    ) -> None:
        self._symbols, self._samples, self._is_short = symbols, samples, is_short
        self._found: dict[Sequence[int], Polynomial | None] = {}
        constant, *others = monomials(len(symbols))
        self._choices = [[constant, *others]]
        if is_short:
            self._choices = [[constant, each] for each in others]

    def polynomial(self, values: Sequence[int], node: fx.Node) -> Polynomial:
        """The only one with these values at the samples."""
        if values not in self._found:
            solved = (self._solved(each, values) for each in self._choices)
            fitting = [each for each in solved if each is not None]
            self._found[values] = fitting[0] if len(fitting) == 1 else None
        found = self._found[values]
        if found is None:
            raise NoPolynomialError(
                f"exported_program: a number in {node.name} ({node.target}) is no polynomial in "
                f"the dynamic sizes {[each.name for each in self._symbols]}: it is "
                f"{list(values[:4])} at {[list(each.values()) for each in self._samples[:4]]}. "
                "Probably an axis splits a dynamic dim there; fix its size at export, or split "
                "other dims"
            )
        return found

    def _solved(self, monomials: Sequence[Monomial], values: Sequence[int]) -> Polynomial | None:
        rows = []
        for sizes in self._samples:
            numbers = list(sizes.values())
            rows.append(
                [Fraction(math.prod(numbers[at] for at in monomial)) for monomial in monomials]
            )
        coefficients = _solution(rows, [Fraction(value) for value in values])
        if coefficients is None:
            return None
        denominator = math.lcm(*(each.denominator for each in coefficients))
        if self._is_short and denominator != 1:
            return None
        pairs = zip(monomials, coefficients, strict=True)
        return Polynomial({m: int(c * denominator) for m, c in pairs if c}, denominator)


def _solution(rows: list[list[Fraction]], values: list[Fraction]) -> list[Fraction] | None:
    """Solve more equations than unknowns, exactly; None if they contradict each other."""
    table = [[*row, value] for row, value in zip(rows, values, strict=True)]
    unknowns = len(rows[0])
    pivots: list[int] = []
    for column in range(unknowns):
        at = len(pivots)
        pivot = next((row for row in range(at, len(table)) if table[row][column]), None)
        if pivot is None:
            continue
        table[at], table[pivot] = table[pivot], table[at]
        scale = table[at][column]
        table[at] = [each / scale for each in table[at]]
        for row in range(len(table)):
            if row != at and table[row][column]:
                times = table[row][column]
                pairs = zip(table[row], table[at], strict=True)
                table[row] = [each - times * other for each, other in pairs]
        pivots.append(column)
    if any(row[-1] for row in table[len(pivots) :]):
        return None
    solution = [Fraction(0)] * unknowns
    for at, column in enumerate(pivots):
        solution[column] = table[at][-1]
    return solution
