"""Whether two sharded tensors are the same, or nearly: one answer, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from shardwise.sharded.tensor import ShardedTensor


def equal(input: ShardedTensor, other: torch.Tensor) -> bool:
    """Whether size and elements are the same, however both are cut."""
    return _compared(input, other, torch.equal)


def allclose(
    input: ShardedTensor,
    other: torch.Tensor,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    equal_nan: bool = False,
) -> bool:
    """Whether the elements are nearly the same, however both are cut."""
    if torch.broadcast_shapes(input.shape, other.shape) != input.shape:  # type: ignore[no-untyped-call]
        return _compared(input, other, torch.allclose)

    def close(one: torch.Tensor, two: torch.Tensor) -> bool:
        return torch.allclose(one, two, rtol, atol, equal_nan)

    return _compared(input, other, close)


def _compared(
    one: ShardedTensor, other: Any, same: Callable[[torch.Tensor, torch.Tensor], bool]
) -> bool:
    if tuple(one.shape) != tuple(other.shape):
        return False
    pieces = one._pieces_of(other)
    verdict = all(same(*pair) for pair in zip(one._tensors(), pieces, strict=True))
    here = torch.tensor(verdict, device=one.device)
    return bool(one._group.communicator.all_reduce(here, "min"))
