"""Who sends what to whom when a tensor moves between two layouts without pending reductions.

Every rank computes its own sends and receives from the two layouts alone, in time proportional to
the number of its peers. Both sides follow one relation, so every send has its receive.

The shards of a layout tile the tensor; each tile is held by one rank or several. A rank needs the
tiles that overlap its new box, but for its own. Within one mesh it asks, for each tile, the holder
that shares its own places on the axes that do not split the source: that spreads the work evenly
over the holders. Between two meshes it asks the holder whose turn it is by the rank's own position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

from shardwise.box import Box, chunk
from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh

Coordinate = tuple[int, ...]


class Transfer(NamedTuple):
    """A box of the global tensor that travels to or from `rank`."""

    rank: int
    box: Box


def receives(source: Layout, target: Layout, rank: int) -> list[Transfer]:
    """What `rank` gets, itself included where it keeps something."""
    place = target.mesh.coordinate_of(rank)
    if place is None:
        return []
    need = target.box(place)
    if source.mesh is target.mesh:
        fixed = unsplit_places(source, place)
        return [
            Transfer(source.mesh.rank_at(holder), part)
            for holder, part in holders(source, need, fixed)
        ]
    first_holder = dict.fromkeys(unsplit_axes(source), 0)
    return [
        Transfer(_holder_for(source, tile, target.mesh, rank), part)
        for tile, part in holders(source, need, first_holder)
    ]


def sends(source: Layout, target: Layout, rank: int) -> list[Transfer]:
    """What `rank` gives, itself included where it keeps something."""
    place = source.mesh.coordinate_of(rank)
    if place is None:
        return []
    own = source.box(place)
    if source.mesh is target.mesh:
        fixed = unsplit_places(source, place)
        return [
            Transfer(target.mesh.rank_at(taker), part)
            for taker, part in holders(target, own, fixed)
        ]
    takers = [
        Transfer(target.mesh.rank_at(taker), part) for taker, part in holders(target, own, {})
    ]
    return [
        taker for taker in takers if _holder_for(source, place, target.mesh, taker.rank) == rank
    ]


def holders(layout: Layout, box: Box, fixed: Mapping[int, int]) -> Iterator[tuple[Coordinate, Box]]:
    """Every coordinate with the `fixed` places whose shard overlaps `box`, and the overlap."""
    mesh = layout.mesh.shape
    split = [
        _overlapping(size, axes, mesh, low, high, fixed)
        for size, axes, low, high in zip(
            layout.shape, layout.shard_order, box.start, box.stop, strict=True
        )
    ]
    loose = [axis for axis in unsplit_axes(layout) if axis not in fixed]
    for parts in product(*split):
        place = [fixed.get(axis, 0) for axis in range(len(mesh))]
        for places, _, _ in parts:
            for axis, index in places:
                place[axis] = index
        common = Box(tuple(part[1] for part in parts), tuple(part[2] for part in parts))
        for indices in product(*(range(mesh[axis]) for axis in loose)):
            for axis, index in zip(loose, indices, strict=True):
                place[axis] = index
            yield tuple(place), common


def unsplit_axes(layout: Layout) -> list[int]:
    """The axes that do not split any dim."""
    split = {axis for axes in layout.shard_order for axis in axes}
    return [axis for axis in range(layout.mesh.ndim) if axis not in split]


def unsplit_places(layout: Layout, place: Coordinate) -> dict[int, int]:
    """The places of a coordinate on the axes that do not split any dim."""
    return {axis: place[axis] for axis in unsplit_axes(layout)}


Places = tuple[tuple[int, int], ...]


def _overlapping(
    size: int,
    axes: tuple[int, ...],
    mesh: tuple[int, ...],
    low: int,
    high: int,
    fixed: Mapping[int, int],
) -> list[tuple[Places, int, int]]:
    """The chunks of one dim that overlap `[low, high)`: their places, and the overlap."""
    found: list[tuple[Places, int, int]] = [((), 0, size)] if low < high else []
    for axis in axes:
        deeper = []
        for places, start, stop in found:
            step = -((start - stop) // mesh[axis])
            first = max(0, (low - start) // step)
            last = min(mesh[axis] - 1, (min(high, stop) - 1 - start) // step)
            if axis in fixed:
                first, last = max(first, fixed[axis]), min(last, fixed[axis])
            for index in range(first, last + 1):
                bounds = chunk(start, stop, mesh[axis], index)
                deeper.append(((*places, (axis, index)), *bounds))
        found = deeper
    overlaps = ((places, max(start, low), min(stop, high)) for places, start, stop in found)
    return [each for each in overlaps if each[1] < each[2]]


def _holder_for(source: Layout, tile: Coordinate, target: DeviceMesh, taker: int) -> int:
    """The rank that gives the tile at `tile` to `taker`, which is in the other mesh."""
    mesh = source.mesh
    unsplit = unsplit_axes(source)
    own = mesh.coordinate_of(taker)
    if own is not None and all(
        own[axis] == tile[axis] for axis in range(mesh.ndim) if axis not in unsplit
    ):
        return taker
    place = target.coordinate_of(taker)
    assert place is not None, "the taker is in the target mesh"
    turn = 0
    for index, size in zip(place, target.shape, strict=True):
        turn = turn * size + index
    turn %= math.prod(mesh.shape[axis] for axis in unsplit)
    holder = list(tile)
    for axis in reversed(unsplit):
        turn, holder[axis] = divmod(turn, mesh.shape[axis])
    return mesh.rank_at(holder)
