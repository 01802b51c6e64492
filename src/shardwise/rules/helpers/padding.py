"""Padding and cropping, for operators that refuse empty shards or need one more row.

All functions are differentiable on all ranks, empty shards included, so that every rank runs the
same backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.core.box import Range
from shardwise.rules.helpers.composed_ops import with_synonyms
from shardwise.rules.spec import Here


def padded(
    tensor: torch.Tensor, sides: Mapping[int, Range], value: float | int = 0
) -> torch.Tensor:
    """Pad dims by (before, after) elements; negative numbers remove elements."""
    if not any(any(each) for each in sides.values()):
        return tensor
    flat = [amount for dim in reversed(range(tensor.dim())) for amount in sides.get(dim, (0, 0))]
    return F.pad(tensor, flat, value=value)


def with_a_row(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Add a row of zeros if the tensor is empty along `dim`, so that index 0 exists."""
    return padded(tensor, {dim: (0, 1)}) if tensor.size(dim) == 0 else tensor


def filled(tensor: torch.Tensor, amounts: Sequence[int] = ()) -> torch.Tensor:
    """Pad empty dims with zeros: by `amounts[dim]` elements, or by one.

    `cropped` removes the results that come from the zeros.
    """
    sides = {
        dim: (0, amounts[dim] if dim < len(amounts) else 1)
        for dim, size in enumerate(tensor.shape)
        if not size
    }
    return padded(tensor, sides)


def cropped(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Narrow each dim of a tensor to its first elements, so that it has this shape."""
    for dim, (have, want) in enumerate(zip(tensor.shape, shape, strict=True)):
        if have != want:
            tensor = tensor.narrow(dim, 0, want)
    return tensor


def for_empty(function: Callable[..., Any]) -> Callable[[Here], Callable[..., Any] | None]:
    """Return the lowering of a function that does not handle empty shards.

    It may refuse them, or return a result of another shape or without gradients. Where the first
    result is empty, the function runs on padded inputs, and the result is cropped to nothing.
    """

    def non_empty(value: Any) -> Any:
        return filled(value) if isinstance(value, torch.Tensor) else value

    def lower(here: Here) -> Callable[..., Any] | None:
        shape = here.outputs[0].local_shape()

        @with_synonyms
        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            keywords = {name: non_empty(value) for name, value in kwargs.items()}
            return cropped(function(*map(non_empty, args), **keywords), shape)

        return run if is_empty(shape) else None

    return lower


def is_empty(shape: Sequence[int]) -> bool:
    """Return whether a tensor of this shape has no elements."""
    return math.prod(shape) == 0
