"""Reductions of the contributions of several ranks, computed on one of them.

Contributions are added in the order of the ranks, so a result does not depend on which came first.
Half types are accumulated in float32 and rounded once. Integers wrap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.core.errors import CollectiveError
from shardwise.core.placement import REDUCE_OPS, ReduceOp, name_of_reduce_op

BOOL_OPS = {"sum": "max", "max": "max", "min": "min", "product": "min"}
"""On bool, "sum" means any and "product" means all."""

UNSIGNED = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
"""Dtypes to compute in, where torch lacks kernels. Sums and products wrap to the same bits."""

_WIDER = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.complex32: torch.complex64,
    **UNSIGNED,
}
_REDUCED = {
    torch.bool,
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
}
_FOLD: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.Tensor.add_,
    "avg": torch.Tensor.add_,
    "max": lambda total, next: torch.maximum(total, next, out=total),
    "min": lambda total, next: torch.minimum(total, next, out=total),
    "product": torch.Tensor.mul_,
}


def as_reduction(op: ReduceOp, dtype: torch.dtype) -> str:
    """Return the name of a reduction, after checking that it is exact for the dtype."""
    name = name_of_reduce_op(op)
    if name is None:
        raise CollectiveError(f"op: expected one of {', '.join(REDUCE_OPS)}, got {op!r}")
    check_reduction(name, dtype)
    return name


def check_reduction(op: str, dtype: torch.dtype) -> None:
    """Check that a reduction has an exact meaning for the dtype."""
    if dtype not in _REDUCED:
        wider = torch.complex64 if dtype.is_complex else torch.float32
        raise CollectiveError(
            f"op: {op!r} of {dtype} is not computed; convert first, with x.to({wider})"
        )
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise CollectiveError(
            f"op: 'avg' of {dtype} would lose the fraction; use 'sum', or convert to a float first"
        )
    if op in ("max", "min") and dtype.is_complex:
        raise CollectiveError(f"op: {op!r} has no meaning for {dtype}; use 'sum' or 'product'")
    if op in ("max", "min") and dtype is torch.uint64:
        raise CollectiveError(
            f"op: {op!r} of {dtype} is not computed, as torch cannot compare it; if all values are "
            "below 2**63, convert first, with x.to(torch.int64)"
        )


def reduce_contributions(pieces: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Return the reduction of pieces of equal shape and dtype, in their order, as a new tensor."""
    dtype = pieces[0].dtype
    as_it_is = dtype.is_floating_point and op in ("max", "min")  # nothing is rounded
    wide = dtype if as_it_is else _WIDER.get(dtype, dtype)
    if dtype is torch.bool:
        op = BOOL_OPS[op]
    rest = list(pieces[1:])
    if op in ("sum", "avg") and wide is dtype and rest:
        total = torch.add(pieces[0], rest.pop(0)).contiguous()  # saves the copy of the first
    else:
        total = pieces[0].to(wide, copy=True, memory_format=torch.contiguous_format)
    for piece in rest:
        total = _FOLD[op](total, piece.to(wide))
    if op == "avg":
        total /= len(pieces)
    return total.to(dtype)


def is_summed_in_place(op: str, dtype: torch.dtype) -> bool:
    """Return whether contributions are added in their own dtype, so that one of them may lie in the
    memory of the result."""
    return op in ("sum", "avg") and dtype is not torch.bool and dtype not in _WIDER


def reduce_into(out: torch.Tensor, pieces: Sequence[torch.Tensor], op: str) -> None:
    """Reduce pieces into `out`, which may be one of them if the reduction `is_summed_in_place`."""
    if not is_summed_in_place(op, out.dtype):
        out.copy_(reduce_contributions(pieces, op))
        return
    rest = [piece for piece in pieces if piece is not out]
    if len(rest) == len(pieces):
        out.copy_(rest.pop())
    for piece in rest:
        out.add_(piece)
    if op == "avg":
        out /= len(pieces)
