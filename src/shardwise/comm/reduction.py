"""Reductions of the contributions of several ranks, computed on one of them.

The order is that of the ranks, so a result does not depend on who came first. Half types are
accumulated in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.errors import CollectiveError
from shardwise.placement import REDUCE_OPS

_FOLD: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.Tensor.add_,
    "avg": torch.Tensor.add_,
    "max": lambda total, next: torch.maximum(total, next, out=total),
    "min": lambda total, next: torch.minimum(total, next, out=total),
    "product": torch.Tensor.mul_,
}
# On bool, "sum" means any and "product" means all.
_BOOL_OP = {"sum": "max", "max": "max", "min": "min", "product": "min"}
_HALF = (torch.bfloat16, torch.float16)


def check_reduction(op: str, dtype: torch.dtype) -> None:
    """Refuse an unknown reduction, and one that has no exact meaning for the dtype."""
    if op not in REDUCE_OPS:
        raise CollectiveError(f"op: expected one of {', '.join(REDUCE_OPS)}, got {op!r}")
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise CollectiveError(
            f"op: 'avg' of {dtype} would lose the fraction; use 'sum', or convert to a float first"
        )
    if op in ("max", "min") and dtype.is_complex:
        raise CollectiveError(f"op: {op!r} has no meaning for {dtype}; use 'sum' or 'product'")


def reduce_contributions(pieces: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """One new tensor: the pieces, equal in shape and dtype, reduced in their order."""
    dtype = pieces[0].dtype
    wide = torch.float32 if dtype in _HALF and op not in ("max", "min") else dtype
    if dtype is torch.bool:
        op = _BOOL_OP[op]
    total = pieces[0].to(wide, copy=True, memory_format=torch.contiguous_format)
    for piece in pieces[1:]:
        total = _FOLD[op](total, piece.to(wide))
    if op == "avg":
        total /= len(pieces)
    return total.to(dtype)
