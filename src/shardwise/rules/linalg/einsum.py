"""torch.einsum: its equation is the rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.rules.linalg.matmul import VF, Tensor, contraction, leading
from shardwise.rules.registry import rule
from shardwise.rules.spec import Spec, SplitContext


@rule(torch.einsum)
def einsum(equation: str, *operands: Tensor) -> Spec:
    """Make the spec from the equation; torch translates lists of subscripts into one."""
    names, output = parsed_equation(equation, [operand.dim() for operand in operands])
    for operand, given in zip(operands, names, strict=True):
        if len(set(zip(given, operand.shape, strict=True))) != len(set(given)):
            raise RuntimeError(f"{equation}: a subscript is repeated with another size")
    return contraction(
        list(zip(operands, names, strict=True)),
        output,
        broadcasts=True,
        lower=lambda context: _lowered(context, names),
        positions={name for given in names for name, times in Counter(given).items() if times > 1},
    )


def parsed_equation(equation: str, ndims: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """Return the subscripts of each operand and of the result; each dim of `...` has its own
    name."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    if len(parts) != len(ndims):
        raise RuntimeError(f"{equation}: expected {len(parts)} operands, got {len(ndims)}")
    counts = [ndim - len(part.replace("...", "")) for part, ndim in zip(parts, ndims, strict=True)]
    for part, count in zip(parts, counts, strict=True):
        if count < 0 or (count and "..." not in part):
            raise RuntimeError(f"{equation}: {part!r} does not fit {count} dims more")
    most = max(
        (count for part, count in zip(parts, counts, strict=True) if "..." in part), default=0
    )
    names = [_expanded(part, count) for part, count in zip(parts, counts, strict=True)]
    if arrow:
        return names, _expanded(right, most)
    # Without "->" the result has the letters that occur once, capitals first.
    letters = Counter(left.replace("...", "").replace(",", ""))
    return names, leading(most) + sorted(name for name, times in letters.items() if times == 1)


def _expanded(part: str, count: int) -> list[str]:
    before, dots, after = part.partition("...")
    return [*before, *(leading(count) if dots else ()), *after]


def _lowered(context: SplitContext, names: Sequence[Sequence[str]]) -> Any:
    """Return the function that runs on the local tensors."""
    cuts = list(_diagonal_cuts(context, names))
    # torch's Python code only chooses the order of products; two operands have one order.
    run = torch.einsum if len(names) > 2 else _einsum
    if not cuts:
        return run

    def on_diagonals(equation: str, *operands: Tensor) -> Tensor:
        pieces = list(operands)
        for operand, dim, start, length in cuts:
            pieces[operand] = pieces[operand].narrow(dim, start, length)
        return run(equation, *pieces)

    return on_diagonals


def _einsum(equation: str, *operands: Tensor) -> Tensor:
    return VF.einsum(equation, operands)  # type: ignore[no-any-return]


def _diagonal_cuts(
    context: SplitContext, names: Sequence[Sequence[str]]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield how to narrow repeated dims, as (operand, dim, start, length).

    Of a repeated subscript such as `ii` only the first dim is split; the others are narrowed to the
    same range.
    """
    for operand, given in enumerate(names):
        for dim, name in enumerate(given):
            first = given.index(name)
            if first != dim and context.inputs[operand].shard_order[first]:
                start, stop = context.inputs[operand].range(first)
                yield operand, dim, start, stop - start
