"""Dims and factors of a call: reading dim and size arguments, and building specs from them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.rules.spec import Dims, Out, Spec, dims_of, normalize_dim

Inputs = list[tuple[torch.Tensor, Dims]]
"""The tensors of a call with their factors, as in `Spec.inputs`."""

# ---- arguments


def as_dims(dim: Any, ndim: int) -> tuple[int, ...]:
    """Return the dims of a `dim` argument as positions from the front; None and () mean all."""
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return tuple(range(ndim))
    given = [normalize_dim(each, ndim) for each in ([dim] if isinstance(dim, int) else dim)]
    for each in given:
        if given.count(each) > 1:
            raise RuntimeError(f"dim {each} appears multiple times in the list of dims")
    return tuple(sorted(given)) if ndim else ()


def as_sizes(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return sizes given as `f(2, 3)` or `f((2, 3))`, with numpy's integers as plain ints."""
    given = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes
    return tuple(each if isinstance(each, torch.Tensor) else _as_int(each) for each in given)


def _as_int(value: Any) -> Any:
    return operator.index(value) if hasattr(value, "__index__") else value


# ---- values for each dim


def without(
    values: Sequence[Any], dims: Sequence[int], keepdim: bool = False, kept: Any = None
) -> tuple[Any, ...]:
    """Drop the values of some dims; with `keepdim`, put `kept` in their place instead."""
    if keepdim:
        return tuple(kept if at in dims else each for at, each in enumerate(values))
    return tuple(each for at, each in enumerate(values) if at not in dims)


def replaced(values: Sequence[Any], dim: int, value: Any) -> tuple[Any, ...]:
    """Return per-dim values with the value of one dim replaced."""
    return (*values[:dim], value, *values[dim + 1 :])


# ---- factors


def given(*inputs: tuple[torch.Tensor | None, Dims]) -> Inputs:
    """Return the inputs that are not None."""
    return [(tensor, dims) for tensor, dims in inputs if tensor is not None]


def broadcast_dims(tensor: torch.Tensor, names: Sequence[str | None], shape: Sequence[int]) -> Dims:
    """Return the factors of a tensor that broadcasts to `shape`, whose factors are `names`."""
    skipped = len(shape) - tensor.dim()
    return tuple(
        names[at + skipped] if at + skipped >= 0 and size == shape[at + skipped] else None
        for at, size in enumerate(tensor.shape)
    )


def whole_along(input: torch.Tensor, dims: Sequence[int], outputs: Sequence[Out]) -> Spec:
    """Return the spec of an operator that needs `dims` whole; the other dims are free."""
    return Spec([(input, without(dims_of(input), dims, True))], outputs)


def unsplit(tensors: Sequence[torch.Tensor], *shapes: Sequence[int], **extra: Any) -> Spec:
    """Return the spec of an operator that needs all tensors whole, with results of these shapes."""
    inputs: Inputs = [(each, (None,) * each.dim()) for each in tensors]
    outputs = [Out((None,) * len(shape), tuple(shape)) for shape in shapes]
    return Spec(inputs, outputs, **extra)
