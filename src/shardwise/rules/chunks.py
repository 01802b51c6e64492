"""The chunks that axes cut a dim into: who has what, and what ranges of indices share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

from shardwise.box import Range, chunk
from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh


def pieces(size: int, mesh: DeviceMesh, axes: Sequence[int]) -> tuple[Range, ...]:
    """The chunks that these axes, outer to inner, cut a dim into."""
    return _pieces(size, tuple(mesh.shape[axis] for axis in axes))


@lru_cache(maxsize=4096)
def _pieces(size: int, parts: tuple[int, ...]) -> tuple[Range, ...]:
    found = [(0, size)]
    for count in parts:
        found = [chunk(*each, count, index) for each in found for index in range(count)]
    return tuple(found)


def shapes_along(layout: Layout, axes: Sequence[int]) -> list[tuple[int, ...]]:
    """The shapes of the pieces of the ranks along these axes of this rank's place, in order."""
    place = layout.mesh.get_coordinate()
    assert place is not None, "this rank is on the mesh"
    found = []
    for along in product(*(range(layout.mesh.shape[axis]) for axis in axes)):
        there = dict(enumerate(place)) | dict(zip(axes, along, strict=True))
        found.append(layout.local_shape([there[axis] for axis in range(layout.mesh.ndim)]))
    return found


def same_units(units: int, sizes: Sequence[int], mesh: DeviceMesh, axes: Sequence[int]) -> bool:
    """Whether dims that are each made of so many equal units are cut alike, between units."""
    found = set()
    for size in sizes:
        each = max(size // max(units, 1), 1)
        bounds = [bound for piece in pieces(size, mesh, axes) for bound in piece]
        if any(bound % each for bound in bounds):
            return False
        found.add(tuple(bound // each for bound in bounds))
    return len(found) == 1


def clipped(given: Range, size: int) -> Range:
    """The part of a range that lies within a dim."""
    start = min(max(given[0], 0), size)
    return start, max(start, min(given[1], size))


def overlap(one: Range, other: Range) -> Range:
    """What two ranges share; a range of length 0 in the first if nothing."""
    start = min(max(one[0], other[0]), one[1])
    return start, max(start, min(one[1], other[1]))
