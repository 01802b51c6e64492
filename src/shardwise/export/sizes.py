"""Dynamic sizes: from graphs recorded at several sizes to one in which sizes are symbols.

A DTensor's layout has numbers in it. So a program with dynamic dims is recorded at several sizes,
near those of the example. The graphs must be the same but for numbers, and each number that varies
must be a polynomial in the symbols: it is found from some of the sizes and must hold at the others.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from shardwise.export.errors import ExportError
from shardwise.export.modules import innermost
from shardwise.export.polynomials import (
    NoPolynomialError,
    Polynomial,
    Sizes,
    Solver,
    Symbol,
    monomials,
)
from shardwise.torch_internals import pytree

_MOST = 2**31
"""What a size without an upper limit is taken to be less than."""


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
    environment: Any = size.node.shape_env
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

_STEPS = 1, 37, 6, 15, 4, 23, 10, 29, 2, 18, 33, 11
"""From the example's size to others: near, as larger ones may want other collectives, but with
other remainders, lest a part of a size looks like a polynomial."""

FEW = 4
"""So many sizes find and check numbers like c0 + c1 * batch * length, as nearly all are."""


def samples(symbols: Sequence[Symbol]) -> list[Sizes]:
    """Sizes to record at: the example's first, and enough to find polynomials and check them."""
    needed = len(monomials(len(symbols))) + 2 if symbols else 1
    found: list[Sizes] = []
    for step in range(8 * needed):
        sizes = {
            each.expression: _near(each, step and _step(step - 1 + at))
            for at, each in enumerate(symbols)
        }
        if sizes not in found:
            found.append(sizes)
        if len(found) == needed:
            break
    return found


def _step(at: int) -> int:
    turns, place = divmod(at, len(_STEPS))
    return _STEPS[place] + 41 * turns


def _near(symbol: Symbol, step: int) -> int:
    """The example's size, or one a few above or below it that is allowed."""
    room = symbol.upper - symbol.lower + 1
    return symbol.lower + (symbol.example - symbol.lower + step) % room


# ---- from numbers to polynomials


Arguments = dict[fx.Node, Any]
"""Those of nodes in which numbers vary, with a `Polynomial` for each."""


def recorded(
    record: Callable[[Sizes], fx.GraphModule], symbols: Sequence[Symbol]
) -> tuple[fx.GraphModule, Arguments]:
    """The graph at the example's sizes, and what varies in it."""
    at = samples(symbols)
    graphs = [record(each) for each in at[:FEW]]
    if len(at) > FEW:
        try:
            return graphs[0], _varying(graphs, Solver(symbols, at[:FEW], is_short=True))
        except NoPolynomialError:
            graphs += [record(each) for each in at[FEW:]]
    return graphs[0], _varying(graphs, Solver(symbols, at))


def _varying(graphs: Sequence[fx.GraphModule], solver: Solver) -> Arguments:
    """The arguments of the first graph's nodes in which not all graphs have the same numbers."""
    lists = [list(each.graph.nodes) for each in graphs]
    index = [{node: at for at, node in enumerate(nodes)} for nodes in lists]
    if len({len(nodes) for nodes in lists}) > 1:
        raise _differs(f"the number of operators{_first_difference(lists)}")
    found: Arguments = {}
    for others in zip(*lists, strict=True):
        node = others[0]
        if any(other.target != node.target and node.op == "call_function" for other in others):
            raise _differs(f"the operator at {node.name}")
        if node.op == "get_attr" and not _are_equal(graphs, others):
            raise _differs(f"the constant {node.name}")
        arguments = [pytree.tree_flatten((other.args, other.kwargs)) for other in others]
        structure = arguments[0][1]
        if any(each != structure for _, each in arguments):
            raise _differs(f"the arguments of {node.name}")
        flat: list[Any] = []
        for values in zip(*(each for each, _ in arguments), strict=True):
            if isinstance(values[0], fx.Node):
                if len({places[value] for places, value in zip(index, values, strict=True)}) > 1:
                    raise _differs(f"what {node.name} is computed from")
                flat.append(values[0])
            elif all(value == values[0] for value in values):
                flat.append(values[0])
            elif all(type(value) is int for value in values):
                flat.append(solver.polynomial(values, node))
            else:
                raise _differs(f"an argument of {node.name}, {values[0]!r},")
        if any(isinstance(each, Polynomial) for each in flat):
            found[node] = pytree.tree_unflatten(flat, structure)
    return found


def _first_difference(lists: Sequence[Sequence[fx.Node]]) -> str:
    """Where graphs begin to differ."""
    for others in zip(*lists, strict=False):
        targets = [str(each.target) for each in others]
        if len(set(targets)) > 1:
            place = innermost(others[0])
            return (
                f" from {others[0].name} on{f', in module {place}' * bool(place)}, which is "
                f"{' or '.join(dict.fromkeys(targets))},"
            )
    return ""


def _are_equal(graphs: Sequence[fx.GraphModule], nodes: Sequence[fx.Node]) -> bool:
    pairs = zip(graphs, nodes, strict=True)
    first, *others = [getattr(graph, str(node.target)) for graph, node in pairs]
    return all(_same(each, first) for each in others)


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
    """

    def __init__(
        self, graph: fx.Graph, program: torch.export.ExportedProgram, symbols: Sequence[Symbol]
    ) -> None:
        self._graph, self._symbols = graph, symbols
        self._nodes: dict[Any, Any] = {}
        self._placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
        self._last = list(self._placeholders.values())[-1]
        self._found = _sources(program, symbols)

    def fill(self, varying: Arguments) -> None:
        """Put nodes in place of the numbers that vary."""
        for node, arguments in varying.items():
            node.args, node.kwargs = pytree.tree_map_only(Polynomial, self._number, arguments)

    def _number(self, polynomial: Polynomial) -> Any:
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


def _sources(
    program: torch.export.ExportedProgram, symbols: Sequence[Symbol]
) -> dict[Any, tuple[str, int, int]]:
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
    return exact
