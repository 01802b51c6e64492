"""Pieces of tensors in the words of torch.distributed.checkpoint.

Imported when it asks: a program that stores nothing does not pay for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
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


class PendingError(LayoutError, AttributeError):
    """A tensor without values to store. An AttributeError: it does not have torch's fields."""


def parts_of(layout: Layout) -> list[tuple[Box, Box]]:
    """The boxes that this rank holds, and where each lies; of values, not of contributions.

    A rank outside of the mesh holds none.
    """
    if layout.partial:
        raise PendingError(
            f"checkpoint: {layout!r} is pending a reduction, and a checkpoint stores values; "
            "x.redistribute() makes it whole"
        )
    return [] if layout.mesh.get_coordinate() is None else layout.boxes()


def boxes_of(layout: Layout) -> list[Box]:
    """The boxes that this rank holds."""
    return [box for box, _ in parts_of(layout)]


def chunk_at(local: torch.Tensor, layout: Layout, offsets: Any) -> torch.Tensor:
    """The part of this rank's piece that is stored as the box at these offsets."""
    if layout.is_cut and offsets is not None:
        for box, here in layout.boxes():
            if box.start == tuple(offsets):
                return local[here.slices]
    return local


def write_items(
    name: str,
    boxes: Sequence[Box],
    size: Sequence[int],
    like: torch.Tensor,
    strides: Sequence[int] | None,
) -> list[Any]:
    """What this rank writes. Of ranks with the same piece, torch's planner lets one write it.

    Arguments:
        like: a tensor of the dtype and device.
        strides: what to note as the tensor's, in versions of torch that note them (2.15).
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(like)
    if hasattr(properties, "strides"):
        properties.strides = None if strides is None else tuple(strides)
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(size)),
        )
        for chunk in chunks(boxes, size)
    ]


Parts = Sequence[tuple[Box, Box]]
"""The boxes of a tensor that a rank holds, each with where it lies in a local tensor."""


class ProtocolField:
    """A field of `torch.distributed.checkpoint.CheckpointableTensor`, which torch has from 2.14 on.

    With these fields torch describes a tensor as pieces of a global one where it does not ask for
    write items, as in a plan of nothing but metadata. The tensor says what it holds:
    `_stored_parts()`.
    """

    def __init__(self, read: Callable[[torch.Size, Parts], tuple[Any, ...]]) -> None:
        self._read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, tensor: Any, owner: type | None = None) -> Any:
        if tensor is None:
            return self
        size = tensor.shape
        parts = [each for each in tensor._stored_parts() if not each[0].is_empty or 0 in size]
        return self._read(size, parts)

    def __set__(self, tensor: Any, value: Any) -> None:
        # torch copies the fields to what it makes of a tensor without memory before it loads.
        if value != (here := self.__get__(tensor)):
            raise LayoutError(
                f"{self._name}: expected {here}, which follows from how the tensor lies; got "
                f"{value!r}"
            )


def global_shape(size: torch.Size, parts: Parts) -> tuple[int, ...]:
    """The size of the whole tensor."""
    return tuple(size)


def global_offsets(size: torch.Size, parts: Parts) -> tuple[tuple[int, ...], ...]:
    """Where each piece begins in the whole tensor."""
    return tuple(box.start for box, _ in parts)


def local_offsets(size: torch.Size, parts: Parts) -> tuple[tuple[int, ...], ...]:
    """Where each piece begins in the local tensor that holds it."""
    return tuple(here.start for _, here in parts)


def local_sizes(size: torch.Size, parts: Parts) -> tuple[tuple[int, ...], ...]:
    """The size of each piece."""
    return tuple(box.shape for box, _ in parts)


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
