"""Check that shards tile a tensor; if not, say which two overlap or what they leave out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from shardwise.core.box import Box
from shardwise.sharded.errors import ShardedTensorError
from shardwise.sharded.metadata import ShardMetadata

_MANY = 64
"""With more boxes than this, a gap is first searched for by halving."""


class BoxIndex:
    """The corners of many boxes of one tensor, to find fast which of them overlap a given box."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        grid = len(boxes), len(boxes[0].start)
        self.starts = np.array([box.start for box in boxes], dtype=np.int64).reshape(grid)
        self.stops = np.array([box.stop for box in boxes], dtype=np.int64).reshape(grid)

    def overlapping(self, box: Box, first: int = 0, end: int | None = None) -> list[int]:
        """Return the positions, from `first` up to `end`, of the boxes that share elements with a
        box."""
        if box.is_empty:
            return []
        starts = np.maximum(self.starts[first:end], box.start)
        stops = np.minimum(self.stops[first:end], box.stop)
        return (np.flatnonzero((starts < stops).all(axis=1)) + first).tolist()

    def volume_within(self, box: Box) -> int:
        """Return the number of elements that all boxes together share with a box."""
        starts, stops = np.maximum(self.starts, box.start), np.minimum(self.stops, box.stop)
        return int(np.maximum(stops - starts, 0).prod(axis=1).sum())


def check_no_overlap(shards: Sequence[ShardMetadata]) -> None:
    """Refuse shards of different numbers of dims, and shards that overlap."""
    boxes = [each.box for each in shards]
    for at, box in enumerate(boxes):
        if len(box.start) != len(boxes[0].start):
            raise ShardedTensorError(
                f"shards: expected boxes of one number of dims; {_name(shards, 0)} has "
                f"{len(boxes[0].start)}, {_name(shards, at)} has {len(box.start)}"
            )
    for first, second in _overlaps(boxes):
        raise ShardedTensorError(
            f"shards: {_name(shards, first)} and {_name(shards, second)} overlap in "
            f"{boxes[first].intersect(boxes[second])}; every element must be in one shard"
        )


def check_tiling(shards: Sequence[ShardMetadata], size: Sequence[int]) -> None:
    """Refuse shards that overlap, reach beyond a tensor of this size, or leave some of it out."""
    check_no_overlap(shards)
    boxes = [each.box for each in shards]
    for at, box in enumerate(boxes):
        if len(box.start) != len(size):
            raise ShardedTensorError(
                f"shards: expected boxes of {len(size)} dims, as the size {tuple(size)} has; "
                f"got {_name(shards, at)}"
            )
        if any(stop > length for stop, length in zip(box.stop, size, strict=True)):
            raise ShardedTensorError(
                f"shards: {_name(shards, at)} reaches beyond the tensor, whose size is "
                f"{tuple(size)}"
            )
    covered, volume = sum(math.prod(box.shape) for box in boxes), math.prod(size)
    if covered != volume:
        free = _find_gap(Box((0,) * len(size), tuple(size)), boxes)
        beside = [_name(shards, at) for at, box in enumerate(boxes) if _touch(box, free)]
        near = f", which lies beside {' and '.join(beside[:2])}" if beside else ""
        raise ShardedTensorError(
            f"shards: they hold {covered} of the {volume} elements of a tensor of size "
            f"{tuple(size)}; nobody holds {free}{near}"
        )


def _name(shards: Sequence[ShardMetadata], at: int) -> str:
    """Name a shard in messages: by number, box and placement."""
    return f"shard {at} ({shards[at].box} on {shards[at].placement or 'no rank'})"


def _overlaps(boxes: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Find pairs of boxes with common elements, by a sweep along the dim with the most
    boundaries."""
    nonempty = [at for at, box in enumerate(boxes) if not box.is_empty]
    if not nonempty or not boxes[nonempty[0]].start:
        yield from pairwise(nonempty)  # a tensor of 0 dims has one element
        return
    ndim = len(boxes[0].start)
    dim = max(range(ndim), key=lambda dim: len({boxes[at].start[dim] for at in nonempty}))
    nonempty.sort(key=lambda at: boxes[at].start[dim])
    index = BoxIndex([boxes[at] for at in nonempty])
    starts = index.starts[:, dim]
    for place, at in enumerate(nonempty):
        end = int(np.searchsorted(starts, boxes[at].stop[dim]))
        for other in index.overlapping(boxes[at], place + 1, end):
            yield min(at, nonempty[other]), max(at, nonempty[other])


def _find_gap(whole: Box, boxes: Sequence[Box]) -> Box:
    """Return a box that no box covers, as large as is easily found."""
    index = BoxIndex(boxes)
    while len(near := index.overlapping(whole)) > _MANY:
        whole = _half_with_gap(whole, index, near)
    free = [whole]
    for box in (boxes[at] for at in near):
        free = [part for each in free for part in _without(each, box)]
    return max(free, key=lambda part: math.prod(part.shape))


def _half_with_gap(whole: Box, index: BoxIndex, near: list[int]) -> Box:
    """Return a part of a box with about half of the boxes near it, which do not fill that part."""
    inner = [
        np.unique(column[column > low])
        for column, low in zip(index.starts[near].T, whole.start, strict=True)
    ]
    dim = max(range(len(inner)), key=lambda dim: len(inner[dim]))
    cut = int(inner[dim][len(inner[dim]) // 2])
    low = Box(whole.start, (*whole.stop[:dim], cut, *whole.stop[dim + 1 :]))
    high = Box((*whole.start[:dim], cut, *whole.start[dim + 1 :]), whole.stop)
    return low if index.volume_within(low) < math.prod(low.shape) else high


def _without(whole: Box, box: Box) -> Iterator[Box]:
    """Split `whole` without `box` into boxes, at most two along each dim."""
    common = whole.intersect(box)
    if common.is_empty:
        yield whole
        return
    start, stop = list(whole.start), list(whole.stop)
    for dim in range(len(start)):
        low, high = common.start[dim], common.stop[dim]
        if start[dim] < low:
            yield Box(tuple(start), (*stop[:dim], low, *stop[dim + 1 :]))
        if high < stop[dim]:
            yield Box((*start[:dim], high, *start[dim + 1 :]), tuple(stop))
        start[dim], stop[dim] = low, high


def _touch(box: Box, other: Box) -> bool:
    """Return whether two boxes that do not overlap share a face."""
    ranges = zip(box.start, box.stop, other.start, other.stop, strict=True)
    gaps = [max(start, theirs) - min(stop, end) for start, stop, theirs, end in ranges]
    return not box.is_empty and max(gaps) == 0 and sum(gap == 0 for gap in gaps) == 1
