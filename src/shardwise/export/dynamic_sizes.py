"""Dynamic sizes: from graphs recorded at several sizes to one graph in which sizes are symbols.

A layout contains numbers. So a program with dynamic dims is recorded at several sizes, near those
of the example. The graphs must be equal except for numbers, and each number that varies must be a
polynomial in the symbols. Some of the samples determine the polynomial; the others must confirm it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from shardwise.core.errors import ExportError
from shardwise.export.annotations import module_path_of
from shardwise.torch_internals import pytree

SymbolSizes = dict[Any, int]
"""A number for each symbol, by its sympy expression."""

# ---- the symbols of a program

_UNBOUNDED = 2**31
"""The upper limit that is assumed for a size without one."""


@dataclass(frozen=True)
class Symbol:
    """A dynamic size of a program: its value in the example, and its limits."""

    expression: Any
    """The sympy symbol in the program's metadata."""
    name: str
    example: int
    lower: int
    upper: int


def find_symbols(program: ExportedProgram) -> list[Symbol]:
    """Return the dynamic sizes of a program's inputs, sorted by name."""
    found: dict[Any, Symbol] = {}
    for node in program.graph.nodes:
        if node.op != "placeholder":
            continue
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            raise ExportError(
                f"exported_program: input {node.name} is a dynamic number, which is not supported; "
                "export it as a constant, or pass a tensor whose size it is"
            )
        if not isinstance(value, torch.Tensor):
            continue
        for size in value.shape:
            if isinstance(size, torch.SymInt):
                for each in size.node.expr.free_symbols:
                    if each not in found:
                        found[each] = _make_symbol(program, each, size)
    return sorted(found.values(), key=lambda each: each.name)


def _make_symbol(program: ExportedProgram, expression: Any, size: torch.SymInt) -> Symbol:
    limits = program.range_constraints.get(expression)
    lower = max(2, int(limits.lower)) if limits is not None else 2
    upper = _UNBOUNDED if limits is None or limits.upper > _UNBOUNDED else int(limits.upper)
    environment: Any = size.node.shape_env
    example = int(environment.backed_var_to_val.get(expression, lower))
    return Symbol(expression, str(expression), min(max(example, lower), upper), lower, upper)


def check_backed(program: ExportedProgram) -> None:
    """Raise ExportError if a size in the program depends on data."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for each in pytree.tree_leaves(value):
            sizes = each.shape if isinstance(each, torch.Tensor) else [each]
            if any(isinstance(size, torch.SymInt) and _is_unbacked(size) for size in sizes):
                raise ExportError(
                    f"exported_program: the size of {node.name} ({node.target}) depends on "
                    "data, so that ranks could not know each other's; such programs are not "
                    "supported"
                )


def _is_unbacked(size: torch.SymInt) -> bool:
    environment = size.node.shape_env
    return environment is not None and any(
        environment.is_unbacked_symint(each) for each in size.node.expr.free_symbols
    )


def evaluate_size(size: Any, sizes: SymbolSizes) -> int:
    """Return the number that a size of the program's metadata has at the given sizes."""
    return int(size.node.expr.subs(sizes)) if isinstance(size, torch.SymInt) else int(size)


# ---- the sizes to record at

_STEPS = 1, 37, 6, 15, 4, 23, 10, 29, 2, 18, 33, 11
"""Differences from the example's size. Small ones, as larger sizes may need other collectives; with
various remainders, so that a rounded part of a size does not look like a polynomial."""

FEW_SAMPLES = 4
"""The number of samples that find and check numbers like c0 + c1 * batch * length: nearly all."""


def sample_sizes(symbols: Sequence[Symbol]) -> list[SymbolSizes]:
    """Return the sizes to record at: the example's first, then enough to find and check numbers."""
    needed = len(_monomials(len(symbols))) + 2 if symbols else 1
    found: list[SymbolSizes] = []
    for turn in range(8 * needed):
        sizes = {
            each.expression: _nearby_size(each, turn and _difference(turn - 1 + at))
            for at, each in enumerate(symbols)
        }
        if sizes not in found:
            found.append(sizes)
        if len(found) == needed:
            break
    return found


def _difference(at: int) -> int:
    rounds, position = divmod(at, len(_STEPS))
    return _STEPS[position] + 41 * rounds


def _nearby_size(symbol: Symbol, difference: int) -> int:
    """Return the example's size plus a difference, wrapped around within the symbol's limits."""
    count = symbol.upper - symbol.lower + 1
    return symbol.lower + (symbol.example - symbol.lower + difference) % count


# ---- from numbers to polynomials

Monomial = tuple[int, ...]
"""A product of symbols, by their positions in the list of symbols; repeated for a square."""


@dataclass(frozen=True)
class Polynomial:
    """A number that depends on the sizes: monomials with coefficients, over one denominator."""

    terms: dict[Monomial, int]
    denominator: int


def _monomials(count: int) -> list[Monomial]:
    """Return the monomials of `count` symbols up to degree two, the constant first."""
    return [
        each for degree in range(3) for each in combinations_with_replacement(range(count), degree)
    ]


class NoPolynomialError(ExportError):
    """A number that is no polynomial of the kind that was searched for."""


class PolynomialSolver:
    """Finds the polynomial of degree two in the symbols that has the given values.

    Arguments:
        samples: the sizes at which numbers were recorded.
        is_short: search only for a constant plus one other term, with integer coefficients.
    """

    def __init__(
        self, symbols: Sequence[Symbol], samples: Sequence[SymbolSizes], is_short: bool = False
    ) -> None:
        self._symbols, self._samples, self._is_short = symbols, samples, is_short
        self._cache: dict[Sequence[int], Polynomial | None] = {}
        constant, *others = _monomials(len(symbols))
        self._candidates = [[constant, *others]]
        if is_short:
            self._candidates = [[constant, each] for each in others]

    def polynomial(self, values: Sequence[int], node: fx.Node) -> Polynomial:
        """Return the only polynomial with these values at the samples, or raise.

        Arguments:
            node: the node that has the number, for errors.
        """
        if values not in self._cache:
            solved = (self._solve(each, values) for each in self._candidates)
            fitting = [each for each in solved if each is not None]
            self._cache[values] = fitting[0] if len(fitting) == 1 else None
        found = self._cache[values]
        if found is None:
            raise NoPolynomialError(
                f"exported_program: a number in {node.name} ({node.target}) is no polynomial in "
                f"the dynamic sizes {[each.name for each in self._symbols]}: it is "
                f"{list(values[:4])} at {[list(each.values()) for each in self._samples[:4]]}. "
                "Probably an axis splits a dynamic dim there; fix its size at export, or split "
                "other dims"
            )
        return found

    def _solve(self, monomials: Sequence[Monomial], values: Sequence[int]) -> Polynomial | None:
        rows = []
        for sizes in self._samples:
            numbers = list(sizes.values())
            rows.append(
                [Fraction(math.prod(numbers[at] for at in monomial)) for monomial in monomials]
            )
        coefficients = _solve_linear(rows, [Fraction(value) for value in values])
        if coefficients is None:
            return None
        denominator = math.lcm(*(each.denominator for each in coefficients))
        if self._is_short and denominator != 1:
            return None
        pairs = zip(monomials, coefficients, strict=True)
        return Polynomial({m: int(c * denominator) for m, c in pairs if c}, denominator)


def _solve_linear(rows: list[list[Fraction]], values: list[Fraction]) -> list[Fraction] | None:
    """Solve an overdetermined system exactly, by elimination; None if it has no solution."""
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
                factor = table[row][column]
                pairs = zip(table[row], table[at], strict=True)
                table[row] = [each - factor * other for each, other in pairs]
        pivots.append(column)
    if any(row[-1] for row in table[len(pivots) :]):
        return None
    solution = [Fraction(0)] * unknowns
    for at, column in enumerate(pivots):
        solution[column] = table[at][-1]
    return solution


# ---- comparing the recorded graphs

VaryingArguments = dict[fx.Node, Any]
"""The (args, kwargs) of nodes in which numbers vary, with a `Polynomial` for each such number."""


def record_at_samples(
    record: Callable[[SymbolSizes], fx.GraphModule], symbols: Sequence[Symbol]
) -> tuple[fx.GraphModule, VaryingArguments]:
    """Record a graph at several sizes; return the graph at the example's sizes, and the arguments
    in it that vary with the sizes."""
    samples = sample_sizes(symbols)
    graphs = [record(each) for each in samples[:FEW_SAMPLES]]
    if len(samples) > FEW_SAMPLES:
        try:
            short = PolynomialSolver(symbols, samples[:FEW_SAMPLES], is_short=True)
            return graphs[0], _find_varying(graphs, short)
        except NoPolynomialError:
            graphs += [record(each) for each in samples[FEW_SAMPLES:]]
    return graphs[0], _find_varying(graphs, PolynomialSolver(symbols, samples))


def _find_varying(graphs: Sequence[fx.GraphModule], solver: PolynomialSolver) -> VaryingArguments:
    """Return the arguments of the first graph's nodes that have other numbers in other graphs."""
    lists = [list(each.graph.nodes) for each in graphs]
    positions = [{node: at for at, node in enumerate(nodes)} for nodes in lists]
    if len({len(nodes) for nodes in lists}) > 1:
        raise _depends_error(f"the number of operators{_first_difference(lists)}")
    found: VaryingArguments = {}
    for nodes in zip(*lists, strict=True):
        node = nodes[0]
        if any(other.target != node.target and node.op == "call_function" for other in nodes):
            raise _depends_error(f"the operator at {node.name}")
        if node.op == "get_attr" and not _are_equal(graphs, nodes):
            raise _depends_error(f"the constant {node.name}")
        arguments = [pytree.tree_flatten((other.args, other.kwargs)) for other in nodes]
        structure = arguments[0][1]
        if any(each != structure for _, each in arguments):
            raise _depends_error(f"the arguments of {node.name}")
        flat: list[Any] = []
        for values in zip(*(each for each, _ in arguments), strict=True):
            if isinstance(values[0], fx.Node):
                if len({known[each] for known, each in zip(positions, values, strict=True)}) > 1:
                    raise _depends_error(f"what {node.name} is computed from")
                flat.append(values[0])
            elif all(value == values[0] for value in values):
                flat.append(values[0])
            elif all(type(value) is int for value in values):
                flat.append(solver.polynomial(values, node))
            else:
                raise _depends_error(f"an argument of {node.name}, {values[0]!r},")
        if any(isinstance(each, Polynomial) for each in flat):
            found[node] = pytree.tree_unflatten(flat, structure)
    return found


def _first_difference(lists: Sequence[Sequence[fx.Node]]) -> str:
    """Describe the first node at which graphs differ, for errors."""
    for nodes in zip(*lists, strict=False):
        targets = [str(each.target) for each in nodes]
        if len(set(targets)) > 1:
            path = module_path_of(nodes[0])
            return (
                f" from {nodes[0].name} on{f', in module {path}' * bool(path)}, which is "
                f"{' or '.join(dict.fromkeys(targets))},"
            )
    return ""


def _are_equal(graphs: Sequence[fx.GraphModule], nodes: Sequence[fx.Node]) -> bool:
    """Check whether the constants of one node are equal in all graphs."""
    pairs = zip(graphs, nodes, strict=True)
    first, *others = [getattr(graph, str(node.target)) for graph, node in pairs]
    return all(_is_same(each, first) for each in others)


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or one.is_meta or other.is_meta:
        return one is other or isinstance(one, torch.Tensor)
    return torch.equal(one, other)


def _depends_error(what: str) -> ExportError:
    return ExportError(
        f"exported_program: {what} depends on a dynamic size, so that one program cannot serve all "
        "sizes; a plan that splits no dim of a dynamic size may help, or a size that is fixed at "
        "export"
    )


# ---- writing polynomials into the graph


class SizeEmitter:
    """Writes polynomials in the symbols into a graph, as nodes that compute them.

    Arguments:
        graph: the graph of the rank's program.
        program: the original program, whose inputs have the symbols in their sizes.
    """

    def __init__(
        self, graph: fx.Graph, program: ExportedProgram, symbols: Sequence[Symbol]
    ) -> None:
        self._graph, self._symbols = graph, symbols
        self._nodes: dict[Any, Any] = {}
        self._placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
        self._last = list(self._placeholders.values())[-1]
        self._sources = _find_sources(program, symbols)

    def fill(self, varying: VaryingArguments) -> None:
        """Replace the numbers that vary by nodes."""
        for node, arguments in varying.items():
            node.args, node.kwargs = pytree.tree_map_only(Polynomial, self._emit, arguments)

    def _emit(self, polynomial: Polynomial) -> Any:
        """Return the node that computes a polynomial, or its number if it is constant."""
        total: Any = None
        for monomial, coefficient in polynomial.terms.items():
            term: Any = coefficient
            for at in monomial:
                term = self._apply(operator.mul, self._symbol(at), term)
            total = term if total is None else self._apply(operator.add, total, term)
        if polynomial.denominator == 1:
            return total
        return self._apply(operator.floordiv, total, polynomial.denominator)

    def _apply(self, function: Callable[..., Any], left: Any, right: Any) -> Any:
        """Return the result of an arithmetic function: a number, or a node."""
        if isinstance(left, int) and isinstance(right, int):
            return function(left, right)
        if right == 1 and function is operator.mul:
            return left
        return self._call((function, left, right), function, left, right)

    def _symbol(self, at: int) -> fx.Node:
        """Return the node that computes a symbol, from the size of an input."""
        symbol = self._symbols[at]
        if symbol.expression not in self._sources:
            raise ExportError(
                f"exported_program: no input has the dynamic size {symbol.name}, or a multiple of "
                "it, as one of its sizes"
            )
        name, dim, factor = self._sources[symbol.expression]
        size: fx.Node = self._call(
            ("size", name, dim), torch.ops.aten.sym_size.int, self._placeholders[name], dim
        )
        return size if factor == 1 else self._apply(operator.floordiv, size, factor)

    def _call(self, key: Any, function: Any, *args: Any) -> Any:
        """Return the node of a call, which is inserted after the others the first time."""
        if key not in self._nodes:
            with self._graph.inserting_after(self._last):
                self._last = self._graph.call_function(function, args)
            self._nodes[key] = self._last
        return self._nodes[key]


def _find_sources(
    program: ExportedProgram, symbols: Sequence[Symbol]
) -> dict[Any, tuple[str, int, int]]:
    """Map each symbol to an input and a dim whose size is a multiple of it, and the factor."""
    wanted = {each.expression for each in symbols}
    found: dict[Any, tuple[str, int, int]] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(value, torch.Tensor):
            continue
        for dim, size in enumerate(value.shape):
            if not isinstance(size, torch.SymInt):
                continue
            expression = size.node.expr
            free = expression.free_symbols
            if len(free) != 1 or not free <= wanted:
                continue
            (symbol,) = free
            factor = expression / symbol
            if factor.is_Integer and (symbol not in found or int(factor) == 1):
                found.setdefault(symbol, (node.name, dim, int(factor)))
    return found
