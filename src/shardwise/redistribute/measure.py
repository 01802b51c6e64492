"""Sizes of shards and overlaps, for all ranks of a mesh at once.

The choice of a plan must be the same on every rank, so it rests on the figures of the busiest rank
and on means. Shards are boxes, so these figures are products over dims of lengths that depend on a
few axes each: arrays that broadcast over the mesh, not a walk over its ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh

# An int, or an array that broadcasts over the mesh.
Sizes = Any
Places = Sequence[Sizes]
Extents = tuple[tuple[Sizes, Sizes], ...]


@lru_cache(maxsize=256)
def places_of(mesh: DeviceMesh) -> Places:
    """The place of every rank on each axis, as arrays that broadcast to the mesh."""
    return tuple(np.ogrid[tuple(slice(size) for size in mesh.shape)])


def extent(
    layout: Layout, dim: int, places: Places, axes: tuple[int, ...] | None = None
) -> tuple[Sizes, Sizes]:
    """Start and stop of the shards along one dim; split by its outer `axes` only, if given."""
    start: Sizes = 0
    stop: Sizes = layout.shape[dim]
    for axis in layout.shard_order[dim] if axes is None else axes:
        step = -((start - stop) // layout.mesh.shape[axis])
        start = np.minimum(start + places[axis] * step, stop)
        stop = np.minimum(start + step, stop)
    return start, stop


@lru_cache(maxsize=4096)
def extents(layout: Layout) -> Extents:
    """Start and stop of the shards of all ranks along every dim."""
    places = places_of(layout.mesh)
    return tuple(extent(layout, dim, places) for dim in range(layout.ndim))


@lru_cache(maxsize=4096)
def volume(layout: Layout) -> Sizes:
    """The number of elements of the shards."""
    result: Sizes = 1
    for start, stop in extents(layout):
        result = result * (stop - start)
    return result


def overlap(source: Layout, target: Layout, free: frozenset[int] = frozenset()) -> Sizes:
    """The elements of each rank's new shard that it holds already, on one mesh.

    With `free` axes: that it holds together with the ranks that differ from it along those.
    """
    if not free & split_axes(source):
        return _overlap(extents(source), extents(target))
    result: Sizes = 1
    for dim, new in enumerate(extents(target)):
        axes = source.shard_order[dim]
        while axes and axes[-1] in free:  # all the chunks of a chunk: together they are that chunk
            axes = axes[:-1]
        chunks = _chunks(source, dim, axes, free)
        result = result * sum(_common_length(chunk, new) for chunk in chunks)
    return result


def _chunks(
    source: Layout, dim: int, axes: tuple[int, ...], free: frozenset[int]
) -> Iterator[tuple[Sizes, Sizes]]:
    """The chunks of one dim, split by `axes`, at all places on `free` axes and each rank's own."""
    there = list(places_of(source.mesh))
    loose = [axis for axis in axes if axis in free]
    for choice in product(*(range(source.mesh.shape[axis]) for axis in loose)):
        for axis, index in zip(loose, choice, strict=True):
            there[axis] = index
        yield extent(source, dim, there, axes)


def tiles(source: Layout, target: Layout, free: frozenset[int] | None = None) -> Sizes:
    """How many different shards of the source each rank's new shard meets.

    With `free` axes: of those that differ from the rank's own along these only, on one mesh.
    """
    result: Sizes = 1
    for dim, new in enumerate(extents(target)):
        axes = source.shard_order[dim]
        if free is None or free.issuperset(axes):
            result = result * _chunks_met(_starts(source, dim), *new)
        else:
            chunks = _chunks(source, dim, axes, free)
            result = result * sum(_common_length(chunk, new) > 0 for chunk in chunks)
    return result


@lru_cache(maxsize=4096)
def _starts(layout: Layout, dim: int) -> NDArray[np.int64]:
    """Where the shards along a dim start, but for empty ones."""
    start, stop = extents(layout)[dim]
    return np.unique(np.asarray(start)[np.asarray(start < stop)])


def _chunks_met(starts: NDArray[np.int64], low: Sizes, high: Sizes) -> Sizes:
    first = np.searchsorted(starts, low, side="right") - 1
    return np.where(low < high, np.searchsorted(starts, high, side="left") - first, 0)


def _overlap(source: Extents, target: Extents) -> Sizes:
    result: Sizes = 1
    for one, other in zip(source, target, strict=True):
        if one is not other:
            result = result * _common_length(one, other)
        else:
            result = result * (one[1] - one[0])
    return result


def _common_length(one: tuple[Sizes, Sizes], other: tuple[Sizes, Sizes]) -> Sizes:
    return np.maximum(np.minimum(one[1], other[1]) - np.maximum(one[0], other[0]), 0)


def busiest(sizes: Sizes) -> int:
    """The largest of the ranks' figures."""
    return int(np.max(sizes))


def mean(sizes: Sizes) -> float:
    """The mean of the ranks' figures; axes they do not depend on do not matter."""
    return float(np.mean(sizes))


@lru_cache(maxsize=4096)
def split_axes(layout: Layout) -> frozenset[int]:
    """The axes that split some dim."""
    return frozenset(axis for axes in layout.shard_order for axis in axes)


def axes_size(mesh: DeviceMesh, axes: Collection[int]) -> int:
    """The number of ranks along several axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


@lru_cache(maxsize=4096)
def received(source: Layout, target: Layout) -> Sizes:
    """The elements each rank must get in a move without pending reductions."""
    if source.mesh is target.mesh:
        return volume(target) - overlap(source, target)
    inside, source_places, target_places = _common(source.mesh, target.mesh)
    needed = np.broadcast_to(volume(target), target.mesh.shape).reshape(-1)
    dims = range(source.ndim)
    kept = _overlap(
        tuple(extent(source, dim, source_places) for dim in dims),
        tuple(extent(target, dim, target_places) for dim in dims),
    )
    return needed - np.where(inside, kept, 0)


def givers(source: Layout, target: Layout) -> Sizes:
    """How many ranks each rank receives from in a move without pending reductions."""
    moved, needed, met = received(source, target), volume(target), tiles(source, target)
    if source.mesh is not target.mesh:
        needed, met = (np.broadcast_to(x, target.mesh.shape).reshape(-1) for x in (needed, met))
    return met - (moved < needed)


def _common(source: DeviceMesh, target: DeviceMesh) -> tuple[NDArray[np.bool_], Places, Places]:
    """For the ranks of the target mesh: which are in the source mesh, and their places in both."""
    ranks = target.mesh.numpy().reshape(-1)
    order = np.argsort(source.mesh.numpy(), axis=None)
    ordered = source.mesh.numpy().reshape(-1)[order]
    at = np.minimum(np.searchsorted(ordered, ranks), len(ordered) - 1)
    inside = ordered[at] == ranks
    source_places = np.unravel_index(order[at], source.shape)
    target_places = np.unravel_index(np.arange(len(ranks)), target.shape)
    return inside, source_places, target_places
