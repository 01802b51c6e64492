"""The chunks into which axes split a dim, and arithmetic on index ranges."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

from shardwise.core.box import Range, chunk
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh


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


def clipped(given: Range, size: int) -> Range:
    """Clip a range to the indices of a dim of this size."""
    start = min(max(given[0], 0), size)
    return start, max(start, min(given[1], size))


def overlap(one: Range, other: Range) -> Range:
    """Return the intersection of two ranges; if they are disjoint, an empty range within `one`."""
    start = min(max(one[0], other[0]), one[1])
    return start, max(start, min(one[1], other[1]))
