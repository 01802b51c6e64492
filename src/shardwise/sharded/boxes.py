"""Do shards tile a tensor? If not, which two overlap, or what do they leave out?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from shardwise.box import Box
from shardwise.sharded.errors import ShardedTensorError
from shardwise.sharded.metadata import ShardMetadata

_FEW = 64


class Corners:
    """Where many boxes of one tensor begin and end, to ask fast which of them meet a box."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        grid = len(boxes), len(boxes[0].start)
        self.starts = np.array([box.start for box in boxes], dtype=np.int64).reshape(grid)
        self.stops = np.array([box.stop for box in boxes], dtype=np.int64).reshape(grid)

    def meeting(self, box: Box, first: int = 0, end: int | None = None) -> list[int]:
        """The numbers, from `first` up to `end`, of those that have elements in common with it."""
        if box.is_empty:
            return []
        starts = np.maximum(self.starts[first:end], box.start)
        stops = np.minimum(self.stops[first:end], box.stop)
        return (np.flatnonzero((starts < stops).all(axis=1)) + first).tolist()

    def volume_within(self, box: Box) -> int:
        """How many elements all of them together have in common with a box."""
        starts, stops = np.maximum(self.starts, box.start), np.minimum(self.stops, box.stop)
        return int(np.maximum(stops - starts, 0).prod(axis=1).sum())


def check_apart(shards: Sequence[ShardMetadata]) -> None:
    """Refuse shards of different numbers of dims, or two that overlap."""
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
    """Refuse shards that overlap, lie outside a tensor of this size, or leave some of it out."""
    check_apart(shards)
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
        free = _left(Box((0,) * len(size), tuple(size)), boxes)
        beside = [_name(shards, at) for at, box in enumerate(boxes) if _touch(box, free)]
        near = f", which lies beside {' and '.join(beside[:2])}" if beside else ""
        raise ShardedTensorError(
            f"shards: they hold {covered} of the {volume} elements of a tensor of size "
            f"{tuple(size)}; nobody holds {free}{near}"
        )


def _name(shards: Sequence[ShardMetadata], at: int) -> str:
    """How messages call a shard: by number, box and place."""
    return f"shard {at} ({shards[at].box} on {shards[at].placement or 'no rank'})"


def _overlaps(boxes: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Pairs of boxes with common elements: a sweep along the dim with the most boundaries."""
    some = [at for at, box in enumerate(boxes) if not box.is_empty]
    if not some or not boxes[some[0]].start:
        yield from pairwise(some)  # of a 0-d tensor there is one element
        return
    ndim = len(boxes[0].start)
    dim = max(range(ndim), key=lambda dim: len({boxes[at].start[dim] for at in some}))
    some.sort(key=lambda at: boxes[at].start[dim])
    corners = Corners([boxes[at] for at in some])
    starts = corners.starts[:, dim]
    for place, at in enumerate(some):
        end = int(np.searchsorted(starts, boxes[at].stop[dim]))
        for other in corners.meeting(boxes[at], place + 1, end):
            yield min(at, some[other]), max(at, some[other])


def _left(whole: Box, boxes: Sequence[Box]) -> Box:
    """A box, as large as is easily found, of what no box covers."""
    corners = Corners(boxes)
    while len(near := corners.meeting(whole)) > _FEW:
        whole = _half_with_a_gap(whole, corners, near)
    free = [whole]
    for box in (boxes[at] for at in near):
        free = [part for each in free for part in _without(each, box)]
    return max(free, key=lambda part: math.prod(part.shape))


def _half_with_a_gap(whole: Box, corners: Corners, near: list[int]) -> Box:
    """A part of a box that other boxes do not fill, in which there are about half of them."""
    inner = [
        np.unique(column[column > low])
        for column, low in zip(corners.starts[near].T, whole.start, strict=True)
    ]
    dim = max(range(len(inner)), key=lambda dim: len(inner[dim]))
    cut = int(inner[dim][len(inner[dim]) // 2])
    low = Box(whole.start, (*whole.stop[:dim], cut, *whole.stop[dim + 1 :]))
    high = Box((*whole.start[:dim], cut, *whole.start[dim + 1 :]), whole.stop)
    return low if corners.volume_within(low) < math.prod(low.shape) else high


def _without(whole: Box, box: Box) -> Iterator[Box]:
    """`whole` but for `box`: at most two parts along each dim."""
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
    """Whether two boxes that do not overlap adjoin."""
    ranges = zip(box.start, box.stop, other.start, other.stop, strict=True)
    gaps = [max(start, theirs) - min(stop, end) for start, stop, theirs, end in ranges]
    return not box.is_empty and max(gaps) == 0 and sum(gap == 0 for gap in gaps) == 1
