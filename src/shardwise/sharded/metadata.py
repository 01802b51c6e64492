"""The description of a sharded tensor: its shards, its size, the properties of its pieces.

Plain data with torch's field names. A placement is torch's `_remote_device`: a rank (or the name of
an RPC worker) and a device there, written `"rank:0/cpu"` or `"trainer0/cuda:1"`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from shardwise.core.box import Box
from shardwise.core.checks import as_ints
from shardwise.core.errors import ShardedTensorError
from shardwise.dtensor.local_shards import check_class
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
        check_class("tensor", self.tensor)
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


# ---- do shards tile a tensor? If not: which two overlap, or what they leave out

_MANY = 64
"""With more boxes than this, a gap is first searched for by halving."""


class BoxIndex:
    """The corners of many boxes of one tensor, to find fast which of them overlap a given box."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        grid = len(boxes), len(boxes[0].start)
        self.starts = np.array([box.start for box in boxes], dtype=np.int64).reshape(grid)
        self.stops = np.array([box.stop for box in boxes], dtype=np.int64).reshape(grid)

    def overlapping(self, box: Box, first: int = 0, end: int | None = None) -> list[int]:
        """Return the positions, from `first` up to `end`, of the boxes that share elements with a
        box."""
        if box.is_empty:
            return []
        starts = np.maximum(self.starts[first:end], box.start)
        stops = np.minimum(self.stops[first:end], box.stop)
        return (np.flatnonzero((starts < stops).all(axis=1)) + first).tolist()

    def volume_within(self, box: Box) -> int:
        """Return the number of elements that all boxes together share with a box."""
        starts, stops = np.maximum(self.starts, box.start), np.minimum(self.stops, box.stop)
        return int(np.maximum(stops - starts, 0).prod(axis=1).sum())


def check_no_overlap(shards: Sequence[ShardMetadata]) -> None:
    """Refuse shards of different numbers of dims, and shards that overlap."""
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
    """Refuse shards that overlap, reach beyond a tensor of this size, or leave some of it out."""
    check_no_overlap(shards)
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
        free = _find_gap(Box((0,) * len(size), tuple(size)), boxes)
        beside = [_name(shards, at) for at, box in enumerate(boxes) if _touch(box, free)]
        near = f", which lies beside {' and '.join(beside[:2])}" if beside else ""
        raise ShardedTensorError(
            f"shards: they hold {covered} of the {volume} elements of a tensor of size "
            f"{tuple(size)}; nobody holds {free}{near}"
        )


def _name(shards: Sequence[ShardMetadata], at: int) -> str:
    """Name a shard in messages: by number, box and placement."""
    return f"shard {at} ({shards[at].box} on {shards[at].placement or 'no rank'})"


def _overlaps(boxes: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Find pairs of boxes with common elements, by a sweep along the dim with the most
    boundaries."""
    nonempty = [at for at, box in enumerate(boxes) if not box.is_empty]
    if not nonempty or not boxes[nonempty[0]].start:
        yield from pairwise(nonempty)  # a tensor of 0 dims has one element
        return
    ndim = len(boxes[0].start)
    dim = max(range(ndim), key=lambda dim: len({boxes[at].start[dim] for at in nonempty}))
    nonempty.sort(key=lambda at: boxes[at].start[dim])
    index = BoxIndex([boxes[at] for at in nonempty])
    starts = index.starts[:, dim]
    for place, at in enumerate(nonempty):
        end = int(np.searchsorted(starts, boxes[at].stop[dim]))
        for other in index.overlapping(boxes[at], place + 1, end):
            yield min(at, nonempty[other]), max(at, nonempty[other])


def _find_gap(whole: Box, boxes: Sequence[Box]) -> Box:
    """Return a box that no box covers, as large as is easily found."""
    index = BoxIndex(boxes)
    while len(near := index.overlapping(whole)) > _MANY:
        whole = _half_with_gap(whole, index, near)
    free = [whole]
    for box in (boxes[at] for at in near):
        free = [part for each in free for part in _without(each, box)]
    return max(free, key=lambda part: math.prod(part.shape))


def _half_with_gap(whole: Box, index: BoxIndex, near: list[int]) -> Box:
    """Return a part of a box with about half of the boxes near it, which do not fill that part."""
    inner = [
        np.unique(column[column > low])
        for column, low in zip(index.starts[near].T, whole.start, strict=True)
    ]
    dim = max(range(len(inner)), key=lambda dim: len(inner[dim]))
    cut = int(inner[dim][len(inner[dim]) // 2])
    low = Box(whole.start, (*whole.stop[:dim], cut, *whole.stop[dim + 1 :]))
    high = Box((*whole.start[:dim], cut, *whole.start[dim + 1 :]), whole.stop)
    return low if index.volume_within(low) < math.prod(low.shape) else high


def _without(whole: Box, box: Box) -> Iterator[Box]:
    """Split `whole` without `box` into boxes, at most two along each dim."""
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
    """Return whether two boxes that do not overlap share a face."""
    ranges = zip(box.start, box.stop, other.start, other.stop, strict=True)
    gaps = [max(start, theirs) - min(stop, end) for start, stop, theirs, end in ranges]
    return not box.is_empty and max(gaps) == 0 and sum(gap == 0 for gap in gaps) == 1
