"""Sharding specs: how a tensor of any size, or of one size, is cut into shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from shardwise.core.box import Box, chunk
from shardwise.core.checks import as_int, as_ints
from shardwise.core.errors import ShardedTensorError, also
from shardwise.sharded.metadata import (
    Placement,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    as_placement,
    check_no_overlap,
    check_tiling,
)
from shardwise.torch_internals import RemoteDevice


class PlacementSpec(ABC):  # noqa: B024 - torch's name for a base without methods
    """Base class of placements that users may define themselves."""


@dataclass
class DevicePlacementSpec(PlacementSpec):
    """A placement on one device.

    Arguments:
        device: a rank and a device, as in `"rank:0/cpu"`.
    """

    device: Placement

    def __post_init__(self) -> None:
        self.device = as_placement(self.device, "device")


class ShardingSpec(ABC):
    """How a tensor is cut into shards, and which rank holds which."""

    @abstractmethod
    def build_metadata(
        self, tensor_sizes: Sequence[int], tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """Return the shards of a tensor of this size."""

    shard: Callable[..., Any]
    """Shard a tensor: `create.shard_by_spec`, set there because tensors are built on specs."""


@dataclass
class ChunkShardingSpec(ShardingSpec):
    """A spec that cuts one dim into equal chunks, the last ones short or empty, as `torch.chunk`
    does.

    Arguments:
        dim: the dim to cut; counted from the end if negative.
        placements: who holds each chunk, in the order of the chunks. Ranks may be in any order, and
            may hold no chunk or several.

    Example:
        >>> ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"])
    """

    dim: int
    placements: list[RemoteDevice]

    def __init__(self, dim: int, placements: Sequence[Placement]) -> None:
        number = as_int(dim)
        if number is None:
            kind = NotImplementedError if isinstance(dim, str) else ValueError  # as torch
            raise also(ShardedTensorError, kind)(f"dim: expected the number of a dim, got {dim!r}")
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
        """Return the chunks of a tensor of this size."""
        size = as_size(tensor_sizes, "tensor_sizes")
        if not -len(size) <= self.dim < len(size):
            raise ShardedTensorError(
                f"dim: expected one of the {len(size)} dims of size {tuple(size)}, got {self.dim}"
            )
        boxes = _chunk_boxes(tuple(size), self.dim % len(size), len(self.placements))
        shards = list(map(ShardMetadata.of_box, boxes, self.placements))
        return ShardedTensorMetadata(shards, size, tensor_properties)


@dataclass
class EnumerableShardingSpec(ShardingSpec):
    """A spec that lists the boxes that make up a tensor of one size.

    Arguments:
        shards: the boxes, and who holds each. Refused if two overlap; gaps are refused when the
            size is known.
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
        check_no_overlap(self.shards)

    def build_metadata(
        self, tensor_sizes: Sequence[int], tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """Return the shards; refused if they do not make up a tensor of this size."""
        size = as_size(tensor_sizes, "tensor_sizes")
        check_tiling(self.shards, size)
        return ShardedTensorMetadata([each.copy() for each in self.shards], size, tensor_properties)


@lru_cache(maxsize=256)
def _chunk_boxes(size: tuple[int, ...], dim: int, count: int) -> list[Box]:
    """Return the boxes of the chunks of a dim."""
    before, after = size[:dim], size[dim + 1 :]
    start, beyond = (0,) * dim, (0,) * len(after)
    bounds = (chunk(0, size[dim], count, index) for index in range(count))
    return [Box((*start, first, *beyond), (*before, last, *after)) for first, last in bounds]


def get_split_size(dim_size: int, chunks: int) -> int:
    """Return the length of all chunks of a dim but the last ones."""
    start, stop = chunk(0, dim_size, chunks, 0)
    return stop - start


def get_chunked_dim_size(dim_size: int, split_size: int, idx: int) -> int:
    """Return the length of one chunk of a dim, where all but the last ones have the
    `split_size`."""
    return len(range(dim_size)[split_size * idx : split_size * (idx + 1)])


def build_checked_metadata(
    spec: ShardingSpec, size: Sequence[int], properties: TensorProperties
) -> ShardedTensorMetadata:
    """Return the shards that a spec cuts a tensor into. The result of a user's own spec is
    checked."""
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


def infer_spec(shards: Sequence[ShardMetadata], size: Sequence[int]) -> ShardingSpec:
    """Return a spec for shards: chunks of one dim if they are that, and else the list of shards."""
    for dim in range(len(size)):
        # Empty shards, whose offsets do not matter, are the last chunks.
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
    """Check metadata, and return its spec.

    Arguments:
        spec: refused if it gives other shards; None to infer it from the shards.
    """
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
        return infer_spec(shards, metadata.size)
    as_spec(spec, "sharding_spec")
    cut = build_checked_metadata(spec, metadata.size, metadata.tensor_properties).shards_metadata
    if _nonempty(cut) != _nonempty(shards):
        raise ShardedTensorError(
            f"sharding_spec: expected one that cuts a tensor of size {tuple(metadata.size)} into "
            f"the metadata's shards {shards}; got {spec}"
        )
    return spec


_MOST_LISTED = 8


def format_spec(spec: ShardingSpec) -> str:
    """Format a spec for messages; of many shards, only the first and the last."""
    if not isinstance(spec, EnumerableShardingSpec) or len(spec.shards) <= _MOST_LISTED:
        return repr(spec)
    first, last = spec.shards[0], spec.shards[-1]
    return f"{type(spec).__name__}([{first}, ..., {last}]) of {len(spec.shards)} shards"


def as_size(sizes: Any, argument: str) -> torch.Size:
    """Return the size of a tensor from numbers, or from one sequence of them."""
    if isinstance(sizes, Sequence) and len(sizes) == 1 and isinstance(sizes[0], Sequence):
        (sizes,) = sizes
    found = as_ints(sizes)
    if found is None or any(size < 0 for size in found):
        raise ShardedTensorError(f"{argument}: expected numbers from 0 on, got {sizes!r}")
    return torch.Size(found)


def as_spec(spec: Any, argument: str) -> ShardingSpec:
    """Return a spec; refuse other types."""
    if not isinstance(spec, ShardingSpec):
        raise also(ShardedTensorError, NotImplementedError)(
            f"{argument}: expected a ShardingSpec, such as ChunkShardingSpec(0, ['rank:0/cpu', "
            f"...]); got {spec!r} ({type(spec).__name__})"
        )
    return spec


def _nonempty(shards: Sequence[ShardMetadata]) -> set[ShardMetadata]:
    """Return the shards with elements; the offsets of empty ones do not matter."""
    return {each for each in shards if not each.box.is_empty}


def _same_elements(one: ShardMetadata, other: ShardMetadata) -> bool:
    """Return whether two shards hold the same elements; offsets of empty ones do not matter."""
    if one.shard_sizes != other.shard_sizes:
        return False
    return one.shard_offsets == other.shard_offsets or 0 in one.shard_sizes
