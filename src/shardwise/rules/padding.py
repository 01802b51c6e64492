"""Tensors made longer, and cut again: for operators that refuse what is empty, or lack a row.

Gradients have their way through all of these, so that all ranks go it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.box import Range
from shardwise.rules.calls import with_synonyms
from shardwise.rules.spec import Here


def padded(
    tensor: torch.Tensor, sides: Mapping[int, Range], value: float | int = 0
) -> torch.Tensor:
    """The tensor with so much added before and after each dim; less than 0 takes away."""
    if not any(any(each) for each in sides.values()):
        return tensor
    flat = [amount for dim in reversed(range(tensor.dim())) for amount in sides.get(dim, (0, 0))]
    return F.pad(tensor, flat, value=value)


def with_a_row(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensor; if it is empty along `dim`, with a zero there, so that index 0 exists."""
    return padded(tensor, {dim: (0, 1)}) if tensor.size(dim) == 0 else tensor


def filled(tensor: torch.Tensor, amounts: Sequence[int] = ()) -> torch.Tensor:
    """The tensor with zeros in dims that are empty; as many as `amounts` say, else one.

    What comes of the zeros is cut off again with `cropped`.
    """
    sides = {
        dim: (0, amounts[dim] if dim < len(amounts) else 1)
        for dim, size in enumerate(tensor.shape)
        if not size
    }
    return padded(tensor, sides)


def cropped(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The first part of a tensor that has this shape."""
    for dim, (have, want) in enumerate(zip(tensor.shape, shape, strict=True)):
        if have != want:
            tensor = tensor.narrow(dim, 0, want)
    return tensor


def for_empty(function: Callable[..., Any]) -> Callable[[Here], Callable[..., Any] | None]:
    """The lowering of a function that refuses an empty piece, or answers it in a way of its own:
    without a way for gradients, or in another shape.

    Where its first result is empty it runs on something, of which nothing is kept.
    """

    def something(value: Any) -> Any:
        return filled(value) if isinstance(value, torch.Tensor) else value

    def lower(here: Here) -> Callable[..., Any] | None:
        shape = here.outputs[0].local_shape()

        @with_synonyms
        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            keywords = {name: something(value) for name, value in kwargs.items()}
            return cropped(function(*map(something, args), **keywords), shape)

        return run if is_empty(shape) else None

    return lower


def is_empty(shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape has no elements."""
    return math.prod(shape) == 0
