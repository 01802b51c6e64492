"""Which rank holds which boxes of a tensor: all that moves follow from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.box import Box
from shardwise.sharded.group import Group
from shardwise.sharded.metadata import ShardedTensorMetadata, ShardMetadata


@dataclass(frozen=True, slots=True)
class Held:
    """Shards by their boxes, and the global rank that holds each."""

    boxes: tuple[Box, ...]
    owners: tuple[int, ...]

    @staticmethod
    def of(shards: Sequence[ShardMetadata], group: Group) -> Held:
        """As metadata describes them."""
        return Held(tuple(each.box for each in shards), tuple(group.owners(shards)))

    @staticmethod
    def whole(size: Sequence[int], rank: int) -> Held:
        """All of a tensor, on one rank."""
        return Held((Box((0,) * len(size), tuple(size)),), (rank,))

    @property
    def nowhere(self) -> Box:
        """A box of no elements, unless the tensor has no dims."""
        corner = (0,) * len(self.boxes[0].start)
        return Box(corner, corner)

    def by(self, rank: int) -> list[Box]:
        """The boxes that a rank holds, in order."""
        return [box for box, owner in zip(self.boxes, self.owners, strict=True) if owner == rank]

    def counts(self, group: Group) -> list[int]:
        """How many elements each rank of a group holds."""
        found = dict.fromkeys(group.ranks, 0)
        for box, owner in zip(self.boxes, self.owners, strict=True):
            found[owner] += math.prod(box.shape)
        return list(found.values())


def mine(metadata: ShardedTensorMetadata, held: Held, group: Group) -> list[ShardMetadata]:
    """The shards of this rank among all."""
    pairs = zip(metadata.shards_metadata, held.owners, strict=True)
    return [each for each, owner in pairs if owner == group.rank]
