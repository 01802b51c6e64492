"""Routes: what each rank gives and takes when shards become others, found once.

Who sends what to whom follows from the boxes and their owners alone, which every rank knows. A
route is plain data: it knows indices and slices, no tensors and no process group.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from shardwise.box import Box
from shardwise.redistribute.transfer import Transfer
from shardwise.sharded.boxes import Corners
from shardwise.sharded.held import Held

_FEW = 256
"""Routes between more boxes than these are found anew each time, as they take memory."""


class Place(NamedTuple):
    """A part of a shard of this rank."""

    at: int
    """The shard's position among those of this rank."""
    slices: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """What one rank does when shards become others."""

    given: list[Transfer]
    taken: list[Transfer]
    """Both ends of a message list its boxes in the same order."""
    parts: dict[Box, Place]
    """Where what is given lies."""
    places: dict[Box, Place]
    """Where what is taken belongs."""
    shapes: list[tuple[int, ...]]
    """Those of this rank's shards afterwards."""
    stays: dict[int, int]
    """The positions of shards that are as they were, and those they had."""
    count: int
    """How many elements all ranks together hold."""
    is_sparse: bool
    """Whether there are no more messages than ranks, if the boxes are few; else it is not known,
    and False. The same on all ranks."""


def route(before: Held, after: Held, ranks: tuple[int, ...], rank: int, keeps: bool) -> Route:
    """What `rank`, one of `ranks`, does for the shards before to become those after.

    Arguments:
        keeps: whether a shard that stays as it is can remain where it lies.
    """
    is_few = len(before.boxes) + len(after.boxes) <= _FEW
    return (_known if is_few else _found)(before, after, ranks, rank, keeps)


def _found(before: Held, after: Held, ranks: tuple[int, ...], rank: int, keeps: bool) -> Route:
    here, wanted = before.by(rank), after.by(rank)
    known = {box: at for at, box in enumerate(here) if keeps and not box.is_empty}
    stays = {at: known[box] for at, box in enumerate(wanted) if box in known}
    given, parts = _shared(here, set(stays.values()), after)
    taken, places = _shared(wanted, stays.keys(), before)
    return Route(
        sorted(given),
        sorted(taken),
        parts,
        places,
        [box.shape for box in wanted],
        stays,
        sum(math.prod(box.shape) for box in before.boxes),
        len(before.boxes) + len(after.boxes) <= _FEW and _is_sparse(before, after, len(ranks)),
    )


_known = lru_cache(maxsize=1024)(_found)


def _shared(
    boxes: Sequence[Box], besides: Container[int], held: Held
) -> tuple[list[Transfer], dict[Box, Place]]:
    """Of each box but some, what it has in common with each that is held, by who holds that."""
    corners = Corners(held.boxes)
    transfers, places = [], {}
    for at, box in enumerate(boxes):
        for other in corners.meeting(box) if at not in besides else ():
            common = box.intersect(held.boxes[other])
            transfers.append(Transfer(held.owners[other], common))
            places[common] = Place(at, common.within(box).slices)
    return transfers, places


def _is_sparse(before: Held, after: Held, limit: int) -> bool:
    """Whether no more than so many pairs of ranks exchange anything."""
    corners, pairs = Corners(after.boxes), set()
    for box, owner in zip(before.boxes, before.owners, strict=True):
        takers = {after.owners[at] for at in corners.meeting(box)}
        pairs |= {(owner, taker) for taker in takers if taker != owner}
        if len(pairs) > limit:
            return False
    return True
