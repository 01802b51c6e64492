"""Dynamic sizes: from graphs recorded at several sizes to one in which sizes are symbols.

A DTensor's layout has numbers in it. So a program with dynamic dims is recorded at several sizes,
near those of the example. The graphs must be the same but for numbers, and each number that varies
must be a polynomial in the symbols: it is found from some of the sizes and must hold at the others.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from shardwise.export.errors import ExportError

_MOST = 2**31
"""What a size without an upper limit is taken to be less than."""

Sizes = dict[Any, int]
"""A number for each symbol."""


@dataclass(frozen=True)
class Symbol:
    """A dynamic size of a program."""

    expression: Any
    """What the program's own metadata calls it."""
    name: str
    example: int
    lower: int
    upper: int


def symbols_of(program: torch.export.ExportedProgram) -> list[Symbol]:
    """The dynamic sizes of a program's inputs."""
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
                        found[each] = _symbol(program, each, size)
    return sorted(found.values(), key=lambda each: each.name)


def _symbol(program: torch.export.ExportedProgram, expression: Any, size: torch.SymInt) -> Symbol:
    limits = program.range_constraints.get(expression)
    lower = max(2, int(limits.lower)) if limits is not None else 2
    upper = _MOST if limits is None or limits.upper > _MOST else int(limits.upper)
    environment = size.node.shape_env
    example = int(environment.backed_var_to_val.get(expression, lower))
    return Symbol(expression, str(expression), min(max(example, lower), upper), lower, upper)


def check_backed(program: torch.export.ExportedProgram) -> None:
    """Refuse sizes that depend on data."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for each in pytree.tree_leaves(value):
            sizes = each.shape if isinstance(each, torch.Tensor) else [each]
            for size in sizes:
                if isinstance(size, torch.SymInt) and size.node.expr.free_symbols & _unbacked(size):
                    raise ExportError(
                        f"exported_program: the size of {node.name} ({node.target}) depends on "
                        "data, so that ranks could not know each other's; such programs are not "
                        "supported"
                    )


def _unbacked(size: torch.SymInt) -> set[Any]:
    environment = size.node.shape_env
    return {
        each
        for each in size.node.expr.free_symbols
        if environment is not None and environment.is_unbacked_symint(each)
    }


def number(size: Any, sizes: Sizes) -> int:
    """A size of the program's metadata, at these sizes."""
    return int(size.node.expr.subs(sizes)) if isinstance(size, torch.SymInt) else int(size)


# ---- at which sizes


def samples(symbols: Sequence[Symbol]) -> list[Sizes]:
    """Sizes to record at: the example's first, and enough to find polynomials and check them."""
    if not symbols:
        return [{}]
    needed = len(_monomials(len(symbols))) + 2
    found: list[Sizes] = []
    for step in range(8 * needed):
        # Different steps for each symbol, so that no two vary together.
        sizes = {
            each.expression: _near(each, step * (2 * at + 1) + (step * step if at else 0))
            for at, each in enumerate(symbols)
        }
        if sizes not in found:
            found.append(sizes)
        if len(found) == needed:
            break
    return found


def _near(symbol: Symbol, step: int) -> int:
    """The example's size, or one a few above or below it that is allowed."""
    room = symbol.upper - symbol.lower + 1
    return symbol.lower + (symbol.example - symbol.lower + step) % room


def _monomials(count: int) -> list[tuple[int, ...]]:
    return [
        each for degree in range(3) for each in combinations_with_replacement(range(count), degree)
    ]


# ---- from numbers to symbols


class Varying:
    """A number of a graph that is another one at other sizes."""

    def __init__(self, values: Sequence[int]) -> None:
        self.values = tuple(values)


def merged(graphs: Sequence[fx.GraphModule]) -> fx.GraphModule:
    """The first graph, with `Varying` for the numbers that are not the same in all."""
    first = graphs[0]
    lists = [list(each.graph.nodes) for each in graphs]
    index = [{node: at for at, node in enumerate(nodes)} for nodes in lists]
    if len({len(nodes) for nodes in lists}) > 1:
        raise _differs("the number of operators")
    for at, node in enumerate(lists[0]):
        others = [nodes[at] for nodes in lists]
        if any(other.target != node.target and node.op == "call_function" for other in others):
            raise _differs(f"the operator at {node.name}")
        if node.op == "get_attr":
            held = [getattr(each, other.target) for each, other in zip(graphs, others, strict=True)]
            if any(not _same(value, held[0]) for value in held):
                raise _differs(f"a constant that {[*node.users][:1]} takes")
        arguments = [pytree.tree_flatten((other.args, other.kwargs)) for other in others]
        if any(structure != arguments[0][1] for _, structure in arguments):
            raise _differs(f"the arguments of {node.name}")
        flat: list[Any] = []
        for values in zip(*(leaves for leaves, _ in arguments), strict=True):
            if isinstance(values[0], fx.Node):
                if len({places[value] for places, value in zip(index, values, strict=True)}) > 1:
                    raise _differs(f"what {node.name} is computed from")
                flat.append(values[0])
            elif all(value == values[0] for value in values):
                flat.append(values[0])
            elif all(type(value) is int for value in values):
                flat.append(Varying(values))
            else:
                raise _differs(f"an argument of {node.name}, {values[0]!r},")
        # Not into the node yet: a graph holds no such things.
        node.meta["varying"] = pytree.tree_unflatten(flat, arguments[0][1])
    return first


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or one.is_meta or other.is_meta:
        return one is other or isinstance(one, torch.Tensor)
    return torch.equal(one, other)


def _differs(what: str) -> ExportError:
    return ExportError(
        f"exported_program: {what} depends on a dynamic size, so that one program cannot serve all "
        "sizes; a plan that does not split what lies along the dynamic dims may help, or a size "
        "that is fixed at export"
    )


class Emitter:
    """Writes polynomials in the symbols into a graph.

    Arguments:
        program: the original one, whose inputs have the symbols in their sizes.
        samples: at which sizes the values of `Varying` were seen.
    """

    def __init__(
        self,
        graph: fx.Graph,
        program: torch.export.ExportedProgram,
        symbols: Sequence[Symbol],
        samples: Sequence[Sizes],
    ) -> None:
        self._graph, self._symbols, self._samples = graph, symbols, samples
        self._monomials = _monomials(len(symbols))
        self._nodes: dict[Any, Any] = {}
        placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
        self._last = list(placeholders.values())[-1]
        self._found = dict(_sources(program, symbols))
        self._placeholders = placeholders

    def fill(self) -> None:
        """Put nodes in place of the numbers that vary."""
        for node in self._graph.nodes:
            varying = node.meta.pop("varying", None)
            if varying is None:
                continue
            leaves, structure = pytree.tree_flatten(varying)
            if not any(isinstance(each, Varying) for each in leaves):
                continue
            leaves = [
                self._number(each, node) if isinstance(each, Varying) else each for each in leaves
            ]
            node.args, node.kwargs = pytree.tree_unflatten(leaves, structure)

    def _number(self, varying: Varying, node: fx.Node) -> fx.Node:
        coefficients = self._solved(varying.values)
        if coefficients is None:
            raise ExportError(
                f"exported_program: a number in {node.name} ({node.target}) is no polynomial in "
                f"the dynamic sizes {[each.name for each in self._symbols]}: it is "
                f"{varying.values[:4]} at {[list(each.values()) for each in self._samples[:4]]}. "
                "Probably an axis splits a dynamic dim there; fix its size at export, or split "
                "other dims"
            )
        total: Any = None
        for monomial, coefficient in zip(self._monomials, coefficients, strict=True):
            if coefficient:
                term: Any = coefficient.numerator
                for at in monomial:
                    term = self._apply(operator.mul, self._symbol(at), term)
                if coefficient.denominator != 1:
                    term = self._apply(operator.floordiv, term, coefficient.denominator)
                total = term if total is None else self._apply(operator.add, total, term)
        return total  # type: ignore[no-any-return]

    def _apply(self, function: Callable[..., Any], left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            return function(left, right)
        if right == 1 and function is operator.mul:
            return left
        key = function, left, right
        if key not in self._nodes:
            with self._graph.inserting_after(self._last):
                self._last = self._graph.call_function(function, (left, right))
            self._nodes[key] = self._last
        return self._nodes[key]

    def _symbol(self, at: int) -> fx.Node:
        symbol = self._symbols[at]
        if symbol.expression not in self._found:
            raise ExportError(
                f"exported_program: no input has the dynamic size {symbol.name}, or a multiple of "
                "it, as one of its sizes"
            )
        name, dim, factor = self._found[symbol.expression]
        key = "size", name, dim
        if key not in self._nodes:
            with self._graph.inserting_after(self._last):
                self._last = self._graph.call_function(
                    torch.ops.aten.sym_size.int, (self._placeholders[name], dim)
                )
            self._nodes[key] = self._last
        size: fx.Node = self._nodes[key]
        return size if factor == 1 else self._apply(operator.floordiv, size, factor)

    def _solved(self, values: Sequence[int]) -> list[Fraction] | None:
        """The polynomial through all samples; None if there is none with these monomials."""
        rows = []
        for sizes in self._samples:
            numbers = list(sizes.values())
            row = []
            for monomial in self._monomials:
                product = 1
                for at in monomial:
                    product *= numbers[at]
                row.append(Fraction(product))
            rows.append(row)
        return _solution(rows, [Fraction(value) for value in values])


def _sources(
    program: torch.export.ExportedProgram, symbols: Sequence[Symbol]
) -> Iterator[tuple[Any, tuple[str, int, int]]]:
    """Which size of which input a symbol is, or of which multiple of it."""
    wanted = {each.expression for each in symbols}
    exact: dict[Any, tuple[str, int, int]] = {}
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
            if factor.is_Integer and (symbol not in exact or int(factor) == 1):
                exact.setdefault(symbol, (node.name, dim, int(factor)))
    yield from exact.items()


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
