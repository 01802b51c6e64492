"""Do boxes tile a tensor? If not, which two overlap, or what do they leave out?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from shardwise.box import Box
from shardwise.sharded.errors import ShardedTensorError


def check_apart(boxes: Sequence[Box], names: Sequence[str]) -> None:
    """Refuse boxes of different numbers of dims, or two that overlap.

    Arguments:
        names: what to call each in a message.
    """
    for box, name in zip(boxes, names, strict=True):
        if len(box.start) != len(boxes[0].start):
            raise ShardedTensorError(
                f"shards: expected boxes of one number of dims; {names[0]} has "
                f"{len(boxes[0].start)}, {name} has {len(box.start)}"
            )
    for first, second in _overlaps(boxes):
        raise ShardedTensorError(
            f"shards: {names[first]} and {names[second]} overlap in "
            f"{boxes[first].intersect(boxes[second])}; every element must be in one shard"
        )


def check_tiling(boxes: Sequence[Box], size: Sequence[int], names: Sequence[str]) -> None:
    """Refuse boxes that overlap, lie outside a tensor of this size, or leave some of it out."""
    check_apart(boxes, names)
    for box, name in zip(boxes, names, strict=True):
        if len(box.start) != len(size):
            raise ShardedTensorError(
                f"shards: expected boxes of {len(size)} dims, as the size {tuple(size)} has; "
                f"got {name}"
            )
        if any(stop > length for stop, length in zip(box.stop, size, strict=True)):
            raise ShardedTensorError(
                f"shards: {name} reaches beyond the tensor, whose size is {tuple(size)}"
            )
    covered, volume = sum(math.prod(box.shape) for box in boxes), math.prod(size)
    if covered != volume:
        free = _left(Box((0,) * len(size), tuple(size)), boxes)
        beside = [name for box, name in zip(boxes, names, strict=True) if _touch(box, free)]
        near = f", which lies beside {' and '.join(beside[:2])}" if beside else ""
        raise ShardedTensorError(
            f"shards: they hold {covered} of the {volume} elements of a tensor of size "
            f"{tuple(size)}; nobody holds {free}{near}"
        )


def _overlaps(boxes: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Pairs of boxes with common elements: a sweep along the dim with the most boundaries."""
    some = [at for at, box in enumerate(boxes) if not box.is_empty]
    if not some or not boxes[some[0]].start:
        yield from pairwise(some)  # of a 0-d tensor there is one element
        return
    ndim = len(boxes[0].start)
    dim = max(range(ndim), key=lambda dim: len({boxes[at].start[dim] for at in some}))
    open_boxes: list[int] = []
    for at in sorted(some, key=lambda at: boxes[at].start[dim]):
        start = boxes[at].start[dim]
        open_boxes = [other for other in open_boxes if boxes[other].stop[dim] > start]
        for other in open_boxes:
            if not boxes[at].intersect(boxes[other]).is_empty:
                yield min(at, other), max(at, other)
        open_boxes.append(at)


def _left(whole: Box, boxes: Sequence[Box]) -> Box:
    """A box, as large as is easily found, of what no box covers."""
    free = [whole]
    for box in boxes:
        free = [part for each in free for part in _without(each, box)]
    return max(free, key=lambda part: math.prod(part.shape))


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
