"""Pieces of tensors in the words of torch.distributed.checkpoint.

Imported when it asks: a program that stores nothing does not pay for it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.box import Box
from shardwise.errors import LayoutError
from shardwise.layout import Layout


def chunks(boxes: Sequence[Box], size: Sequence[int]) -> list[Any]:
    """The boxes of a tensor of this size that a rank holds, without empty ones."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))
        for box in boxes
        if not box.is_empty or 0 in size
    ]


def boxes_of(layout: Layout) -> list[Box]:
    """The boxes that this rank holds; they must be values, not contributions."""
    if layout.partial:
        raise LayoutError(
            f"checkpoint: {layout!r} is pending a reduction, and a checkpoint stores values; "
            "x.redistribute() makes it whole"
        )
    return [box for box, _ in layout.boxes()]


def chunk_at(local: torch.Tensor, layout: Layout, offsets: Any) -> torch.Tensor:
    """The part of this rank's piece that is stored as the box at these offsets."""
    if layout.is_cut and offsets is not None:
        for box, here in layout.boxes():
            if box.start == tuple(offsets):
                return local[here.slices]
    return local


def write_items(
    name: str, boxes: Sequence[Box], size: Sequence[int], like: torch.Tensor
) -> list[Any]:
    """What this rank writes. Of ranks with the same piece, torch's planner lets one write it.

    Arguments:
        like: a tensor of the dtype and device.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(like)
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(size)),
        )
        for chunk in chunks(boxes, size)
    ]


class CheckpointStager:
    """Copies a state dict before `torch.distributed.checkpoint.async_save` returns.

    The stager that it has copies storages, one for each tensor of the global size, and DTensors and
    ShardedTensors of this library have none such.

    Example:
        >>> dcp.async_save(state, checkpoint_id=path, async_stager=sw.CheckpointStager())
    """

    should_synchronize_after_execute = False
    """The copy is made when it is asked for; there is nothing to wait for."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy that later steps do not change."""
        return copy.deepcopy(state_dict)

    def synchronize_staging(self) -> None:
        """Of torch's protocol; see above."""

    def close(self) -> None:
        """Of torch's protocol; it keeps nothing."""
