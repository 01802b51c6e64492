"""A piece of a DTensor in the words of torch.distributed.checkpoint.

Imported when it asks: a program that stores nothing does not pay for it.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.errors import LayoutError
from shardwise.layout import Layout


def chunks(layout: Layout) -> list[Any]:
    """The boxes that this rank holds; nothing if they are empty."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    if layout.partial:
        raise LayoutError(
            f"checkpoint: {layout!r} is pending a reduction, and a checkpoint stores values; "
            "x.redistribute() makes it whole"
        )
    return [
        ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))
        for box, _ in layout.boxes()
        if not (box.is_empty and layout.numel)
    ]


def chunk_at(local: torch.Tensor, layout: Layout, offsets: Any) -> torch.Tensor:
    """The part of this rank's piece that is stored as the box at these offsets."""
    if layout.is_cut and offsets is not None:
        for box, here in layout.boxes():
            if box.start == tuple(offsets):
                return local[here.slices]
    return local


def write_items(name: str, local: torch.Tensor, layout: Layout) -> list[Any]:
    """What this rank writes. Of ranks with the same piece, torch's planner lets one write it."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=layout.size),
        )
        for chunk in chunks(layout)
    ]
