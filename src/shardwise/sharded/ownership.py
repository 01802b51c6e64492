"""Which rank holds which boxes of a tensor. Transfers between ranks follow from this alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.core.box import Box
from shardwise.sharded.group import RankGroup
from shardwise.sharded.metadata import ShardedTensorMetadata, ShardMetadata


@dataclass(frozen=True, slots=True)
class ShardOwnership:
    """The boxes of all shards of a tensor, and the global rank that holds each."""

    boxes: tuple[Box, ...]
    owners: tuple[int, ...]

    @staticmethod
    def of(shards: Sequence[ShardMetadata], group: RankGroup) -> ShardOwnership:
        """Read boxes and owners off the metadata of shards."""
        return ShardOwnership(tuple(each.box for each in shards), tuple(group.owners(shards)))

    @staticmethod
    def whole(size: Sequence[int], rank: int) -> ShardOwnership:
        """Return the ownership of a tensor that one rank holds whole."""
        return ShardOwnership((Box((0,) * len(size), tuple(size)),), (rank,))

    @property
    def empty_box(self) -> Box:
        """A box without elements (with one element, if the tensor has no dims)."""
        corner = (0,) * len(self.boxes[0].start)
        return Box(corner, corner)

    def boxes_of(self, rank: int) -> list[Box]:
        """Return the boxes that a rank holds, in order."""
        return [box for box, owner in zip(self.boxes, self.owners, strict=True) if owner == rank]

    def element_counts(self, group: RankGroup) -> list[int]:
        """Return the number of elements that each rank of a group holds."""
        counts = dict.fromkeys(group.ranks, 0)
        for box, owner in zip(self.boxes, self.owners, strict=True):
            counts[owner] += math.prod(box.shape)
        return list(counts.values())


def local_metadata(
    metadata: ShardedTensorMetadata, ownership: ShardOwnership, group: RankGroup
) -> list[ShardMetadata]:
    """Return the metadata of the shards that this rank holds."""
    pairs = zip(metadata.shards_metadata, ownership.owners, strict=True)
    return [each for each, owner in pairs if owner == group.rank]
