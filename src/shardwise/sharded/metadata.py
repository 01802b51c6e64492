"""The description of a sharded tensor: its shards, its size, the properties of its pieces.

Plain data with torch's field names. A placement is torch's `_remote_device`: a rank (or the name of
an RPC worker) and a device there, written `"rank:0/cpu"` or `"trainer0/cuda:1"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from shardwise.core.box import Box
from shardwise.core.checks import as_ints
from shardwise.sharded.errors import ShardedTensorError
from shardwise.torch_internals import RemoteDevice

Placement = RemoteDevice | str


def as_placement(placement: Placement | torch.device, argument: str) -> RemoteDevice:
    """Return a placement, parsed if it is given as text."""
    if isinstance(placement, RemoteDevice):
        return placement
    try:
        return RemoteDevice(placement)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ShardedTensorError(
            f"{argument}: expected a placement such as 'rank:0/cpu' or 'worker0/cuda:1', "
            f"got {placement!r} ({error})"
        ) from None


def on_device(placement: RemoteDevice, device: torch.device) -> RemoteDevice:
    """Return a placement on the same rank or worker and on another device."""
    if placement.rank() is not None:
        return RemoteDevice(f"rank:{placement.rank()}/{device}")
    if placement.worker_name() is not None:
        return RemoteDevice(f"{placement.worker_name()}/{device}")
    return RemoteDevice(device)


@dataclass(init=False, slots=True)
class ShardMetadata:
    """The position of one shard in the whole tensor, its size, and who holds it.

    Arguments:
        shard_offsets: the first index of each dim.
        shard_sizes: the length of each dim.
        placement: `"rank:0/cpu"`, with the global rank; None while it is not known.
    """

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: RemoteDevice | None

    def __init__(
        self,
        shard_offsets: Sequence[int],
        shard_sizes: Sequence[int],
        placement: Placement | None = None,
    ) -> None:
        self.shard_offsets = _as_counts("shard_offsets", shard_offsets)
        self.shard_sizes = _as_counts("shard_sizes", shard_sizes)
        if len(self.shard_offsets) != len(self.shard_sizes):
            raise ShardedTensorError(
                "shard_offsets, shard_sizes: expected as many of each, one per dim; "
                f"got {self.shard_offsets} and {self.shard_sizes}"
            )
        self.placement = None if placement is None else as_placement(placement, "placement")

    @property
    def box(self) -> Box:
        """The indices of the whole tensor that this shard covers."""
        ends = zip(self.shard_offsets, self.shard_sizes, strict=True)
        return Box(tuple(self.shard_offsets), tuple(start + size for start, size in ends))

    @property
    def device(self) -> torch.device:
        """The device of the shard on the rank that holds it."""
        assert self.placement is not None, "the shard has a holder"
        return self.placement.device()

    @staticmethod
    def of_box(box: Box, placement: Placement | None) -> ShardMetadata:
        """Make the metadata of a box without checking it."""
        made = object.__new__(ShardMetadata)
        made.shard_offsets, made.shard_sizes = list(box.start), list(box.shape)
        made.placement = None if placement is None else as_placement(placement, "placement")
        return made

    def copy(self, device: torch.device | None = None) -> ShardMetadata:
        """Return a copy, on another device if one is given."""
        placement = self.placement
        if device is not None and placement is not None:
            placement = on_device(placement, device)
        return ShardMetadata(self.shard_offsets, self.shard_sizes, placement)

    def __repr__(self) -> str:
        where = None if self.placement is None else str(self.placement)
        return f"ShardMetadata({self.shard_offsets}, {self.shard_sizes}, {where!r})"

    def __hash__(self) -> int:
        return hash((*self.shard_offsets, *self.shard_sizes, self.placement))


def _as_counts(argument: str, values: Sequence[int]) -> list[int]:
    """Return ints from 0 on, one per dim, or refuse them."""
    found = as_ints(values)
    if found is None or any(value < 0 for value in found):
        raise ShardedTensorError(f"{argument}: expected numbers from 0 on, got {values!r}")
    return list(found)


class MEM_FORMAT_ENCODING(Enum):  # noqa: N801 - torch's name
    """The numbers of memory formats in a pickle, as they cannot be pickled themselves."""

    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2


_MEMORY_FORMATS = {
    torch.contiguous_format: MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT,
    torch.channels_last: MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST,
    torch.preserve_format: MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT,
}


@dataclass
class TensorProperties:
    """The properties that all shards of a tensor have in common.

    Arguments:
        strides: the strides of the whole tensor, if it had any before it was cut; None stands for
            contiguous ones. A field of torch 2.15, here with all versions.
    """

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False
    strides: tuple[int, ...] | None = None

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """Return the properties of a tensor, its strides included."""
        return TensorProperties(
            dtype=tensor.dtype,
            layout=tensor.layout,
            requires_grad=tensor.requires_grad,
            pin_memory=tensor.is_pinned(),
            strides=tuple(tensor.stride()),
        )

    @staticmethod
    def common_to(tensor: torch.Tensor) -> TensorProperties:
        """Return the properties that a tensor shares with all pieces of the same whole: all but the
        strides, as pieces are cut and copied."""
        return replace(TensorProperties.create_from_tensor(tensor), strides=None)

    def __getstate__(self) -> tuple[Any, ...]:
        encoded = _MEMORY_FORMATS.get(self.memory_format)
        if encoded is None:
            raise ShardedTensorError(
                f"memory_format: expected one of {', '.join(map(str, _MEMORY_FORMATS))} to "
                f"pickle, got {self.memory_format}"
            )
        state = self.dtype, self.layout, self.requires_grad, encoded.value, self.pin_memory
        return *state, self.strides

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype, self.layout, self.requires_grad, encoded, self.pin_memory = state[:5]
        self.strides = state[5] if len(state) > 5 else None  # older pickles have no strides
        formats = {each.value: memory_format for memory_format, each in _MEMORY_FORMATS.items()}
        self.memory_format = formats[encoded]


@dataclass
class ShardedTensorMetadata:
    """The metadata of a whole sharded tensor: its shards, its size, and their common properties."""

    shards_metadata: list[ShardMetadata] = field(default_factory=list)
    size: torch.Size = field(default_factory=lambda: torch.Size([]))
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)

    def copy(self, device: torch.device | None = None, **properties: Any) -> ShardedTensorMetadata:
        """Return a copy, on another device or with other properties. Without a device, the metadata
        of the shards is shared."""
        shards = self.shards_metadata
        if device is not None:
            shards = [each.copy(device) for each in shards]
        return ShardedTensorMetadata(
            shards, self.size, replace(self.tensor_properties, **properties)
        )


@dataclass(slots=True, eq=False)
class Shard:
    """A shard that this rank holds.

    Arguments:
        tensor: the elements.
        metadata: their position in the whole tensor.
    """

    tensor: torch.Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Refuse a tensor whose size or device is not that of the metadata."""
        if not isinstance(self.tensor, torch.Tensor):
            raise ShardedTensorError(f"tensor: expected a tensor, got {self.tensor!r}")
        if list(self.tensor.shape) != self.metadata.shard_sizes:
            raise ShardedTensorError(
                f"tensor: expected the metadata's shard_sizes {self.metadata.shard_sizes}, "
                f"got a tensor of shape {list(self.tensor.shape)}"
            )
        placement = self.metadata.placement
        if placement is not None and not is_on(self.tensor, placement.device()):
            raise ShardedTensorError(
                f"tensor: expected one on the device of its placement {placement}, "
                f"got one on {self.tensor.device}"
            )

    @classmethod
    def from_tensor_and_offsets(
        cls, tensor: torch.Tensor, shard_offsets: Sequence[int], rank: int
    ) -> Shard:
        """Make the shard that begins at these offsets and is held by a global rank."""
        placement = f"rank:{rank}/{tensor.device}"
        return cls(tensor, ShardMetadata(shard_offsets, tensor.shape, placement))


def narrow_tensor(tensor: torch.Tensor, metadata: ShardMetadata) -> torch.Tensor:
    """Return the part of a whole tensor that a shard covers, as a view."""
    return narrow_tensor_by_index(tensor, metadata.shard_offsets, metadata.shard_sizes)


def narrow_tensor_by_index(
    tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """Return the part of a tensor that begins at these offsets and has these sizes, as a view."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether a tensor is on a device. A device without an index stands for any of its
    type."""
    if device.index is None:
        return tensor.device.type == device.type
    return tensor.device == device
