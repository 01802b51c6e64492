"""Sharding specs: how a tensor of any size, or of one size, is cut into shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from shardwise.box import Box, chunk
from shardwise.checks import as_int, as_ints
from shardwise.sharded.boxes import check_apart, check_tiling
from shardwise.sharded.errors import ShardedTensorError
from shardwise.sharded.metadata import (
    Placement,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    as_placement,
)
from shardwise.torch_internals import RemoteDevice

if TYPE_CHECKING:
    from shardwise.sharded.group import GroupLike
    from shardwise.sharded.tensor import ShardedTensor


class PlacementSpec(ABC):  # noqa: B024 - torch's name for a base without methods
    """Where something is. Base of what users may define themselves."""


@dataclass
class DevicePlacementSpec(PlacementSpec):
    """Something that is on one device.

    Arguments:
        device: a rank and a device, as in `"rank:0/cpu"`.
    """

    device: Placement

    def __post_init__(self) -> None:
        self.device = as_placement(self.device, "device")


class ShardingSpec(ABC):
    """How a tensor is cut into shards, and who holds which."""

    @abstractmethod
    def build_metadata(
        self, tensor_sizes: Sequence[int], tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """The shards of a tensor of this size."""

    def shard(
        self, tensor: torch.Tensor, src_rank: int = 0, process_group: GroupLike = None
    ) -> ShardedTensor:
        """A tensor that one rank has whole, as a sharded tensor; all ranks call it.

        Arguments:
            tensor: on ranks other than the source, only its shape and dtype count.
            src_rank: whose data it becomes, by its index in the process group.
            process_group: the ranks that take part; all by default.
        """
        from shardwise.sharded.scattering import scattered

        return scattered(tensor, self, src_rank, process_group)


@dataclass
class ChunkShardingSpec(ShardingSpec):
    """A dim cut into equal chunks, the last ones short or empty, as `torch.chunk` cuts it.

    Arguments:
        dim: which; counted from the end if negative.
        placements: who holds each chunk, in the order of the chunks. Any order of ranks, and some
            may hold none or several.

    Example:
        >>> ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"])
    """

    dim: int
    placements: list[RemoteDevice]

    def __init__(self, dim: int, placements: Sequence[Placement]) -> None:
        number = as_int(dim)
        if number is None:
            raise ShardedTensorError(f"dim: expected the number of a dim, got {dim!r}")
        if isinstance(placements, str) or not isinstance(placements, Sequence) or not placements:
            raise ShardedTensorError(
                f"placements: expected one for each chunk, and at least one; got {placements!r}"
            )
        self.dim = number
        self.placements = [
            as_placement(each, f"placements[{at}]") for at, each in enumerate(placements)
        ]

    def __repr__(self) -> str:
        return f"ChunkShardingSpec({self.dim}, {[str(each) for each in self.placements]})"

    def build_metadata(
        self, tensor_sizes: Sequence[int], tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """The chunks of a tensor of this size."""
        size = as_size(tensor_sizes, "tensor_sizes")
        if not -len(size) <= self.dim < len(size):
            raise ShardedTensorError(
                f"dim: expected one of the {len(size)} dims of size {tuple(size)}, got {self.dim}"
            )
        boxes = _chunks(tuple(size), self.dim % len(size), len(self.placements))
        shards = list(map(ShardMetadata.of_box, boxes, self.placements))
        return ShardedTensorMetadata(shards, size, tensor_properties)


@dataclass
class EnumerableShardingSpec(ShardingSpec):
    """Any boxes that together make up a tensor of one size.

    Arguments:
        shards: the boxes, and who holds each. No two may overlap; that nothing is left out is
            checked when the size is known.
    """

    shards: list[ShardMetadata]

    def __post_init__(self) -> None:
        self.shards = list(self.shards)
        if not self.shards:
            raise ShardedTensorError("shards: expected at least one, got none")
        for at, each in enumerate(self.shards):
            if not isinstance(each, ShardMetadata):
                raise ShardedTensorError(
                    f"shards[{at}]: expected ShardMetadata, got {type(each).__name__}"
                )
        check_apart(self.shards)

    def build_metadata(
        self, tensor_sizes: Sequence[int], tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """The shards, which must make up a tensor of this size."""
        size = as_size(tensor_sizes, "tensor_sizes")
        check_tiling(self.shards, size)
        return ShardedTensorMetadata([each.copy() for each in self.shards], size, tensor_properties)


@lru_cache(maxsize=256)
def _chunks(size: tuple[int, ...], dim: int, count: int) -> list[Box]:
    """The boxes of the chunks of a dim."""
    before, after = size[:dim], size[dim + 1 :]
    start, beyond = (0,) * dim, (0,) * len(after)
    bounds = (chunk(0, size[dim], count, index) for index in range(count))
    return [Box((*start, first, *beyond), (*before, last, *after)) for first, last in bounds]


def get_split_size(dim_size: int, chunks: int) -> int:
    """The length of all chunks of a dim but the last ones."""
    start, stop = chunk(0, dim_size, chunks, 0)
    return stop - start


def get_chunked_dim_size(dim_size: int, split_size: int, idx: int) -> int:
    """The length of one chunk of a dim, where all but the last ones have the `split_size`."""
    return len(range(dim_size)[split_size * idx : split_size * (idx + 1)])


def metadata_of(
    spec: ShardingSpec, size: Sequence[int], properties: TensorProperties
) -> ShardedTensorMetadata:
    """The shards that a spec cuts a tensor into; checked, if the spec is of the user's own kind."""
    metadata = spec.build_metadata(torch.Size(size), properties)
    if type(spec) in (ChunkShardingSpec, EnumerableShardingSpec):
        return metadata
    name = f"{type(spec).__name__}.build_metadata"
    shards = metadata.shards_metadata if isinstance(metadata, ShardedTensorMetadata) else []
    if not shards or metadata.size != torch.Size(size):
        raise ShardedTensorError(
            f"{name}: expected ShardedTensorMetadata of size {tuple(size)}, got {metadata!r}"
        )
    try:
        check_tiling(shards, size)
    except ShardedTensorError as error:
        raise ShardedTensorError(f"{name}: {error}") from None
    return metadata


def inferred_spec(shards: Sequence[ShardMetadata], size: Sequence[int]) -> ShardingSpec:
    """Chunks of one dim if the shards are that, and else the shards themselves."""
    for dim in range(len(size)):
        # Empty shards, which may begin anywhere, are the last chunks.
        ordered = sorted(
            shards,
            key=lambda each: (each.box.is_empty, each.shard_offsets[dim], each.shard_sizes[dim]),
        )
        placements = [each.placement for each in ordered]
        if None in placements:
            break
        spec = ChunkShardingSpec(dim, placements)  # type: ignore[arg-type]
        chunks = spec.build_metadata(size, TensorProperties()).shards_metadata
        if all(_same_elements(*pair) for pair in zip(ordered, chunks, strict=True)):
            return spec
    return EnumerableShardingSpec([each.copy() for each in shards])


def checked_spec(metadata: ShardedTensorMetadata, spec: ShardingSpec | None) -> ShardingSpec:
    """The spec of metadata that makes up a tensor."""
    shards = metadata.shards_metadata
    if not shards:
        raise ShardedTensorError("shards_metadata: expected at least one shard, got none")
    if metadata.tensor_properties.layout != torch.strided:
        raise ShardedTensorError(
            "tensor_properties.layout: expected torch.strided, got "
            f"{metadata.tensor_properties.layout}"
        )
    check_tiling(shards, metadata.size)
    if spec is None:
        return inferred_spec(shards, metadata.size)
    as_spec(spec, "sharding_spec")
    cut = metadata_of(spec, metadata.size, metadata.tensor_properties).shards_metadata
    if _some(cut) != _some(shards):
        raise ShardedTensorError(
            f"sharding_spec: expected one that cuts a tensor of size {tuple(metadata.size)} into "
            f"the metadata's shards {shards}; got {spec}"
        )
    return spec


def summary(spec: ShardingSpec) -> str:
    """A spec in messages: of many shards, only the first and the last."""
    if not isinstance(spec, EnumerableShardingSpec) or len(spec.shards) <= _SHOWN:
        return repr(spec)
    first, last = spec.shards[0], spec.shards[-1]
    return f"{type(spec).__name__}([{first}, ..., {last}]) of {len(spec.shards)} shards"


_SHOWN = 8


def as_size(sizes: Any, argument: str) -> torch.Size:
    """The size of a tensor from numbers, or from one sequence of them."""
    if isinstance(sizes, Sequence) and len(sizes) == 1 and isinstance(sizes[0], Sequence):
        (sizes,) = sizes
    found = as_ints(sizes)
    if found is None or any(size < 0 for size in found):
        raise ShardedTensorError(f"{argument}: expected numbers from 0 on, got {sizes!r}")
    return torch.Size(found)


def as_spec(spec: Any, argument: str) -> ShardingSpec:
    """Refuse what is no spec."""
    if not isinstance(spec, ShardingSpec):
        raise ShardedTensorError(
            f"{argument}: expected a ShardingSpec, such as ChunkShardingSpec(0, ['rank:0/cpu', "
            f"...]); got {spec!r} ({type(spec).__name__})"
        )
    return spec


def _some(shards: Sequence[ShardMetadata]) -> set[ShardMetadata]:
    """Those that hold elements; where others begin does not matter."""
    return {each for each in shards if not each.box.is_empty}


def _same_elements(one: ShardMetadata, other: ShardMetadata) -> bool:
    """Where an empty shard begins does not matter."""
    if one.shard_sizes != other.shard_sizes:
        return False
    return one.shard_offsets == other.shard_offsets or 0 in one.shard_sizes
