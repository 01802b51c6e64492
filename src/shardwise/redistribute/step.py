"""Steps: the moves a plan is made of, each from one layout to another, with its figures.

The choice of a plan must be the same on every rank, so a step's figures are global facts: those of
the busiest rank, and means over all ranks. Shards are boxes, so these figures are products over
dims of lengths that depend on a few axes each. They are computed for all ranks at once, as arrays
that broadcast over the mesh, not by a walk over its ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.redistribute.transfer import Roles, split_axes, unsplit_axes

Sizes = Any
"""A figure of every rank: an int, or an array that broadcasts over the mesh."""
Places = Sequence[Sizes]
"""For each axis, the places of all ranks."""
Extents = tuple[tuple[Sizes, Sizes], ...]
"""For each dim, where the shards of all ranks start and stop."""

Kind = Literal[
    "slice",
    "scale",
    "reduce_scatter",
    "all_reduce",
    "reduce_exchange",
    "exchange",
    "all_gather",
    "zero_fill",
]
COLLECTIVES = ("reduce_scatter", "all_reduce", "reduce_exchange", "exchange", "all_gather")


@dataclass(frozen=True, slots=True)
class Step:
    """One move. Counts are in elements; the plan knows the bytes of one."""

    kind: Kind
    source: Layout
    target: Layout
    axes: tuple[int, ...] = ()
    """The axes it communicates over; empty for a local step and between two meshes."""
    moved: Sizes = field(default=0, compare=False)
    """The elements each rank receives."""
    received: int = 0
    """The elements the busiest rank receives."""
    dim: int = 0
    """The dim that an all_gather joins or a reduce_scatter splits."""
    op: str = "sum"

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of its axes."""
        return tuple(map(self.source.mesh.axis_name, self.axes))

    @property
    def peers(self) -> int:
        """The largest number of ranks that one rank receives from."""
        match self.kind:
            case "exchange":
                return _peers_of_exchange(self.source, self.target)
            case "reduce_exchange":
                return _peers_of_rounds(self.source, self.target)
            case _:
                return axes_size(self.source.mesh, self.axes) - 1

    @property
    def mean_received(self) -> float:
        """The elements a rank receives on average."""
        return mean(self.moved)

    @property
    def communicates(self) -> bool:
        """Whether it is a collective."""
        return self.kind in COLLECTIVES

    def __repr__(self) -> str:
        over = f" over {'.'.join(self.axis_names)}" if self.axes else ""
        return f"{self.kind}{over}: {self.source!r} -> {self.target!r}"


def local(kind: Kind, source: Layout, target: Layout) -> Step:
    """Return a step without communication: slice, scale or zero_fill."""
    return Step(kind, source, target)


@lru_cache(maxsize=4096)
def all_gather(source: Layout, dim: int, count: int) -> Step:
    """Return the step that gathers a dim over its `count` innermost axes."""
    axes = source.shard_order[dim][-count:]
    order = list(source.shard_order)
    order[dim] = order[dim][:-count]
    target = source.relaid(order)
    return _collective("all_gather", source, target, axes, received(source, target), dim)


@lru_cache(maxsize=4096)
def reduce_scatter(source: Layout, axes: tuple[int, ...], dim: int, op: str) -> Step:
    """Return the step that reduces over axes and splits a dim over them, inside its other axes."""
    order = list(source.shard_order)
    order[dim] = (*order[dim], *axes)
    target = source.relaid(order, without(source, axes))
    moved = (axes_size(source.mesh, axes) - 1) * volume(target)
    return _collective("reduce_scatter", source, target, axes, moved, dim, op)


@lru_cache(maxsize=4096)
def all_reduce(source: Layout, axes: tuple[int, ...], op: str) -> Step:
    """Return the step that reduces over axes; every rank gets the result."""
    target = source.relaid(partial=without(source, axes))
    size = axes_size(source.mesh, axes)
    moved = 2 * volume(source) * (size - 1) / size  # on average: chunks may be uneven
    return _collective("all_reduce", source, target, axes, moved, op=op)


@lru_cache(maxsize=4096)
def exchange(source: Layout, target: Layout) -> Step:
    """Return the step that sends every rank what it lacks: one all-to-all of box overlaps."""
    axes: tuple[int, ...] = ()
    if source.mesh is target.mesh:
        axes = tuple(sorted(split_axes(source) - _outer_axes(source, target)))
    return _collective("exchange", source, target, axes, received(source, target))


@lru_cache(maxsize=4096)
def reduce_exchange(source: Layout, target: Layout, op: str) -> Step:
    """Return the step that reduces and moves in two rounds (see `transfer`, on ownership)."""
    roles = Roles(source, target)
    first, second = rounds(source, target, roles)
    given_along = {*roles.ending, *roles.split} - _outer_axes(source, target)
    axes = tuple(sorted({*given_along, *roles.replicas}))
    return _collective("reduce_exchange", source, target, axes, first + second, op=op)


def rounds(source: Layout, target: Layout, roles: Roles) -> tuple[Sizes, Sizes]:
    """Return the elements each rank receives in the two rounds of a reduce-exchange."""
    mesh = source.mesh
    free = frozenset(roles.split - roles.fixed)
    missing = volume(target) - overlap(source, target, free)
    at_home = _divided(overlap(source, target), axes_size(mesh, roles.sharing))
    away = _divided(missing, axes_size(mesh, roles.able))
    contributions = axes_size(mesh, roles.ending)
    first = (contributions - 1) * at_home + contributions * away
    owned = np.broadcast_to(at_home + away, mesh.shape)
    return first, owned.sum(axis=tuple(roles.replicas), keepdims=True) - owned


def collectives(step: Step) -> int:
    """Return the number of collectives of a step: two for a reduce-exchange with replicas."""
    if step.kind == "reduce_exchange" and Roles(step.source, step.target).replicas:
        return 2
    return int(step.communicates)


def without(layout: Layout, axes: tuple[int, ...]) -> dict[int, str]:
    """Return the pending reductions of a layout except those over `axes`."""
    return {axis: op for axis, op in layout.partial if axis not in axes}


def replicated_axes(layout: Layout) -> list[int]:
    """Return the axes along which all ranks hold the same elements."""
    pending = {axis for axis, _ in layout.partial}
    return [axis for axis in unsplit_axes(layout) if axis not in pending]


def _outer_axes(source: Layout, target: Layout) -> set[int]:
    """Return the outer axes that split the same dims of both layouts in the same way."""
    same: set[int] = set()
    for before, after in zip(source.shard_order, target.shard_order, strict=True):
        for one, other in zip(before, after, strict=False):
            if one != other:
                break
            same.add(one)
    return same


@lru_cache(maxsize=4096)
def _peers_of_exchange(source: Layout, target: Layout) -> int:
    return busiest(givers(source, target))


@lru_cache(maxsize=4096)
def _peers_of_rounds(source: Layout, target: Layout) -> int:
    """Return the largest number of ranks that one rank receives from in the two rounds of a
    reduce-exchange."""
    roles = Roles(source, target)
    home = np.broadcast_to(overlap(source, target) > 0, source.mesh.shape).astype(int)
    free = frozenset(roles.split - roles.fixed)
    away = tiles(source, target) - tiles(source, target, free)
    first = axes_size(source.mesh, roles.ending) * (home + away) - home
    owns = (home + away > 0).astype(int)
    second = owns.sum(axis=tuple(roles.replicas), keepdims=True) - owns
    return busiest(first + second)


def _divided(sizes: Sizes, parts: int) -> Sizes:
    return -(-np.asarray(sizes) // parts)


def _collective(
    kind: Kind,
    source: Layout,
    target: Layout,
    axes: tuple[int, ...],
    moved: Sizes,
    dim: int = 0,
    op: str = "sum",
) -> Step:
    return Step(kind, source, target, axes, moved, busiest(moved), dim, op)


# ---- sizes of shards and overlaps, for all ranks of a mesh at once


@lru_cache(maxsize=256)
def places_of(mesh: DeviceMesh) -> Places:
    """Return the places of all ranks on each axis, as arrays that broadcast to the mesh."""
    return tuple(np.ogrid[tuple(slice(size) for size in mesh.shape)])


def extent(
    layout: Layout, dim: int, places: Places, axes: tuple[int, ...] | None = None
) -> tuple[Sizes, Sizes]:
    """Return start and stop of the shards along one dim; split by its outer `axes` only, if
    given."""
    start: Sizes = 0
    stop: Sizes = layout.shape[dim]
    for axis in layout.shard_order[dim] if axes is None else axes:
        step = -((start - stop) // layout.mesh.shape[axis])
        start = np.minimum(start + places[axis] * step, stop)
        stop = np.minimum(start + step, stop)
    return start, stop


@lru_cache(maxsize=4096)
def extents(layout: Layout) -> Extents:
    """Return start and stop of the shards of all ranks along every dim."""
    places = places_of(layout.mesh)
    return tuple(extent(layout, dim, places) for dim in range(layout.ndim))


@lru_cache(maxsize=4096)
def volume(layout: Layout) -> Sizes:
    """Return the number of elements of each shard."""
    result: Sizes = 1
    for start, stop in extents(layout):
        result = result * (stop - start)
    return result


def overlap(source: Layout, target: Layout, free: frozenset[int] = frozenset()) -> Sizes:
    """Return how many elements of its new shard each rank holds already, on one mesh.

    With `free` axes: how many it holds together with the ranks that differ from it along those.
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
    """Yield the chunks of one dim, split by `axes`: at all places on `free` axes, and at each
    rank's
    own place on the others."""
    there = list(places_of(source.mesh))
    loose = [axis for axis in axes if axis in free]
    for choice in product(*(range(source.mesh.shape[axis]) for axis in loose)):
        for axis, index in zip(loose, choice, strict=True):
            there[axis] = index
        yield extent(source, dim, there, axes)


def tiles(source: Layout, target: Layout, free: frozenset[int] | None = None) -> Sizes:
    """Return how many different shards of the source each rank's new shard overlaps.

    With `free` axes: only shards that differ from the rank's own along these, on one mesh.
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
    """Return where the non-empty shards along a dim start."""
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
    """Return the largest of the ranks' figures, rounded up."""
    return int(np.ceil(np.max(sizes)))


def mean(sizes: Sizes) -> float:
    """Return the mean of the ranks' figures; axes they do not depend on do not matter."""
    return float(np.mean(sizes))


def axes_size(mesh: DeviceMesh, axes: Collection[int]) -> int:
    """Return the number of ranks along several axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


@lru_cache(maxsize=4096)
def received(source: Layout, target: Layout) -> Sizes:
    """Return the elements each rank must receive in a move without pending reductions."""
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
    """Return how many ranks each rank receives from in a move without pending reductions."""
    moved, needed, met = received(source, target), volume(target), tiles(source, target)
    if source.mesh is not target.mesh:
        needed, met = (np.broadcast_to(x, target.mesh.shape).reshape(-1) for x in (needed, met))
    return met - (moved < needed)


def _common(source: DeviceMesh, target: DeviceMesh) -> tuple[NDArray[np.bool_], Places, Places]:
    """Return, for the ranks of the target mesh, which are in the source mesh and their places in
    both."""
    ranks = target.mesh.numpy().reshape(-1)
    order = np.argsort(source.mesh.numpy(), axis=None)
    ordered = source.mesh.numpy().reshape(-1)[order]
    at = np.minimum(np.searchsorted(ordered, ranks), len(ordered) - 1)
    inside = ordered[at] == ranks
    source_places = np.unravel_index(order[at], source.shape)
    target_places = np.unravel_index(np.arange(len(ranks)), target.shape)
    return inside, source_places, target_places
