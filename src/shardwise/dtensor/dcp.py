"""The protocol of torch.distributed.checkpoint (DCP): what each rank stores of a tensor.

DCP is imported when it is first needed: a program that stores nothing does not pay for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.core.box import Box
from shardwise.core.errors import LayoutError, also
from shardwise.core.layout import Layout


def chunks(boxes: Sequence[Box], size: Sequence[int]) -> list[Any]:
    """Describe the boxes that a rank holds of a tensor of this size, without empty ones."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))
        for box in boxes
        if not box.is_empty or 0 in size
    ]


def parts_of(layout: Layout) -> list[tuple[Box, Box]]:
    """List the boxes that this rank holds, each with its box in the local tensor.

    A rank outside of the mesh holds none. Pending reductions are refused, by an error that is an
    AttributeError too: the tensor lacks the fields of torch's protocol.
    """
    if layout.partial:
        raise also(LayoutError, AttributeError)(
            f"checkpoint: {layout!r} is pending a reduction, and a checkpoint stores values; "
            "x.redistribute() makes it whole"
        )
    return [] if layout.mesh.get_coordinate() is None else layout.boxes()


def boxes_of(layout: Layout) -> list[Box]:
    """List the boxes that this rank holds."""
    return [box for box, _ in parts_of(layout)]


def chunk_at(local: torch.Tensor, layout: Layout, offsets: Any) -> torch.Tensor:
    """Return the part of this rank's shard that is stored as the box at these offsets."""
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
    """List the items that this rank writes. torch's planner lets one of several replicas write.

    Arguments:
        name: the name of the tensor in the checkpoint.
        size: the global shape.
        like: a tensor of the same dtype and device.
        strides: the strides to store, in versions of torch that store them (2.15).
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
"""The boxes that a rank holds of a tensor, each with its box in the local tensor."""


class ProtocolField:
    """A field of `torch.distributed.checkpoint.CheckpointableTensor`, which torch has from 2.14 on.

    With these fields torch describes the pieces of a global tensor where it needs no write items,
    as in a plan of metadata only. `_stored_parts()` of the tensor lists the pieces.

    Arguments:
        read: makes the value of the field of the global size and the pieces.
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
        # Before it loads, torch copies the fields to the tensor that replaces one without memory.
        if value != (expected := self.__get__(tensor)):
            raise LayoutError(
                f"{self._name}: expected {expected}, which follows from the tensor's layout; got "
                f"{value!r}"
            )


def global_shape(size: torch.Size, parts: Parts) -> tuple[int, ...]:
    """Return the size of the whole tensor."""
    return tuple(size)


def global_offsets(size: torch.Size, parts: Parts) -> tuple[tuple[int, ...], ...]:
    """Return where each piece begins in the whole tensor."""
    return tuple(box.start for box, _ in parts)


def local_offsets(size: torch.Size, parts: Parts) -> tuple[tuple[int, ...], ...]:
    """Return where each piece begins in the local tensor that holds it."""
    return tuple(here.start for _, here in parts)


def local_sizes(size: torch.Size, parts: Parts) -> tuple[tuple[int, ...], ...]:
    """Return the size of each piece."""
    return tuple(box.shape for box, _ in parts)


class CheckpointStager:
    """The stager for `torch.distributed.checkpoint.async_save`: copies the state dict.

    Torch's own stagers work too; this one needs no options and keeps nothing.

    Example:
        >>> dcp.async_save(state, checkpoint_id=path, async_stager=sw.CheckpointStager())
    """

    should_synchronize_after_execute = False
    """`stage` returns a complete copy, so there is nothing to wait for."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy that later training steps do not change."""
        return copy.deepcopy(state_dict)

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` has copied. Part of torch's protocol."""

    def close(self) -> None:
        """Do nothing: the stager holds no resources. Part of torch's protocol."""
