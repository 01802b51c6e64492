"""Dims of a call: dim and size arguments, factors and specs made from them, and chunks of dims."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import torch

from shardwise.core.box import Range, chunk
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
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


def drop_dims(
    values: Sequence[Any], dims: Sequence[int], keepdim: bool = False, kept: Any = None
) -> tuple[Any, ...]:
    """Drop the values of some dims; with `keepdim`, put `kept` in their place instead."""
    if keepdim:
        return tuple(kept if at in dims else each for at, each in enumerate(values))
    return tuple(each for at, each in enumerate(values) if at not in dims)


def replace_dim(values: Sequence[Any], dim: int, value: Any) -> tuple[Any, ...]:
    """Return per-dim values with the value of one dim replaced."""
    return (*values[:dim], value, *values[dim + 1 :])


# ---- factors


def present_inputs(*inputs: tuple[torch.Tensor | None, Dims]) -> Inputs:
    """Return the inputs that are not None."""
    return [(tensor, dims) for tensor, dims in inputs if tensor is not None]


def broadcast_dims(tensor: torch.Tensor, names: Sequence[str | None], shape: Sequence[int]) -> Dims:
    """Return the factors of a tensor that broadcasts to `shape`, whose factors are `names`."""
    skipped = len(shape) - tensor.dim()
    return tuple(
        names[at + skipped] if at + skipped >= 0 and size == shape[at + skipped] else None
        for at, size in enumerate(tensor.shape)
    )


def whole_dims_spec(input: torch.Tensor, dims: Sequence[int], outputs: Sequence[Out]) -> Spec:
    """Return the spec of an operator that needs `dims` whole; the other dims are free."""
    return Spec([(input, drop_dims(dims_of(input), dims, True))], outputs)


def unsplit_spec(tensors: Sequence[torch.Tensor], *shapes: Sequence[int], **extra: Any) -> Spec:
    """Return the spec of an operator that needs all tensors whole, with results of these shapes."""
    inputs: Inputs = [(each, (None,) * each.dim()) for each in tensors]
    outputs = [Out((None,) * len(shape), tuple(shape)) for shape in shapes]
    return Spec(inputs, outputs, **extra)


# ---- chunks of a dim, and index ranges


def chunks_of(size: int, mesh: DeviceMesh, axes: Sequence[int]) -> tuple[Range, ...]:
    """Return the chunks into which these axes, outer to inner, split a dim."""
    return _pieces(size, tuple(mesh.shape[axis] for axis in axes))


@lru_cache(maxsize=4096)
def _pieces(size: int, parts: tuple[int, ...]) -> tuple[Range, ...]:
    found = [(0, size)]
    for count in parts:
        found = [chunk(*each, count, index) for each in found for index in range(count)]
    return tuple(found)


def shapes_along(layout: Layout, axes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the local shapes of the ranks along these axes through this rank, in rank order."""
    place = layout.mesh.get_coordinate()
    assert place is not None, "this rank is on the mesh"
    found = []
    for along in product(*(range(layout.mesh.shape[axis]) for axis in axes)):
        there = dict(enumerate(place)) | dict(zip(axes, along, strict=True))
        found.append(layout.local_shape([there[axis] for axis in range(layout.mesh.ndim)]))
    return found


def same_units(units: int, sizes: Sequence[int], mesh: DeviceMesh, axes: Sequence[int]) -> bool:
    """Return whether dims of `units` equal units each are all split between the same units."""
    found = set()
    for size in sizes:
        each = max(size // max(units, 1), 1)
        bounds = [bound for piece in chunks_of(size, mesh, axes) for bound in piece]
        if any(bound % each for bound in bounds):
            return False
        found.add(tuple(bound // each for bound in bounds))
    return len(found) == 1


def clip(given: Range, size: int) -> Range:
    """Clip a range to the indices of a dim of this size."""
    start = min(max(given[0], 0), size)
    return start, max(start, min(given[1], size))


def overlap(one: Range, other: Range) -> Range:
    """Return the intersection of two ranges; if they are disjoint, an empty range within `one`."""
    start = min(max(one[0], other[0]), one[1])
    return start, max(start, min(one[1], other[1]))


def out_of_range(lowest: int, size: int) -> IndexError:
    """Return the error for indices that are out of range."""
    return IndexError(f"index out of range: expected indices from {lowest} to {size - 1}")
