"""Whether two tensors are the same, or nearly: one answer, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.sharded.tensor import ShardedTensor
from shardwise.tensor import DTensor


def is_same_size(input: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the size is the same."""
    return tuple(input.shape) == tuple(other.shape)


def equal(input: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether size and elements are the same, however both are cut."""
    if not is_same_size(input, other):
        return False
    return _compared(input, other, torch.equal)


def allclose(
    input: torch.Tensor,
    other: torch.Tensor,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    equal_nan: bool = False,
) -> bool:
    """Whether the elements are nearly the same, however both are cut; they may broadcast."""

    def close(one: torch.Tensor, two: torch.Tensor) -> bool:
        return torch.allclose(one, two, rtol, atol, equal_nan)

    if is_same_size(input, other):
        return _compared(input, other, close)
    return close(_whole(input), _whole(other))


def _whole(tensor: Any) -> torch.Tensor:
    is_split = isinstance(tensor, ShardedTensor | DTensor)
    return tensor.full_tensor() if is_split else tensor  # type: ignore[no-any-return]


def _compared(
    one: torch.Tensor, other: torch.Tensor, same: Callable[[torch.Tensor, torch.Tensor], bool]
) -> bool:
    model: Any = one if isinstance(one, ShardedTensor) else other
    same(_none_of(one), _none_of(other))  # what is refused, every rank refuses
    pairs = zip(model._pieces_of(one), model._pieces_of(other), strict=True)
    verdict = all(same(*pair) for pair in pairs)
    here = torch.tensor(verdict, device=model.device)
    return bool(model._group.communicator.all_reduce(here, "min"))


def _none_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device)
