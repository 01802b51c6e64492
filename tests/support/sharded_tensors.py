"""Specs, tensors that every rank can make, and checks of errors for sharded tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm import Event, listen
from shardwise.core import world
from shardwise.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    Shard,
    ShardedTensor,
    ShardedTensorError,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def chunks(dim: int, *ranks: int) -> ChunkShardingSpec:
    """Return the spec of a dim in chunks, held by these ranks in this order."""
    return ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])


def shard_at(offsets: Sequence[int], sizes: Sequence[int], rank: int = 0) -> ShardMetadata:
    """Return the metadata of a shard on a rank."""
    return ShardMetadata(offsets, sizes, f"rank:{rank}/cpu")


def rows(
    rank: int, count: int = 2, width: int = 3, offset: int | None = None, **options: Any
) -> Shard:
    """Return the rank's two rows of a tensor of three columns."""
    start = rank * count if offset is None else offset
    tensor = torch.full((count, width), float(rank), **options)
    return Shard(tensor, shard_at([start, 0], [count, width], rank))


def cut(*shards: tuple[Sequence[int], Sequence[int], int]) -> EnumerableShardingSpec:
    """Return the spec of boxes, given by offsets, sizes and ranks."""
    return EnumerableShardingSpec([shard_at(*each) for each in shards])


def rank_here() -> int:
    """Return the global rank of the caller."""
    return world.current().rank


def numbers(size: Sequence[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return 1, 2, 3, ... (modulo 13 in dtypes of one byte); the same on every rank."""
    count = torch.arange(1, math.prod(size) + 1).reshape(tuple(size))
    return (count % 13 if dtype.itemsize == 1 else count).to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether shape, dtype and every bit are the same."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    first, second = (each.detach().contiguous().reshape(-1) for each in (one, other))
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def by_rank(metadata: ShardedTensorMetadata) -> ShardedTensorMetadata:
    """Return metadata whose shards are listed in the order of the ranks."""
    shards = sorted(metadata.shards_metadata, key=lambda each: each.placement.rank())
    return replace(metadata, shards_metadata=shards)


def is_cut_of(x: ShardedTensor, whole: torch.Tensor, spec: ShardingSpec | None = None) -> bool:
    """Return whether this rank's shards are parts of `whole` as their metadata says.

    They must also be the shards that `spec`, by default the tensor's own, gives to this rank. The
    metadata lists them in the order of the spec or, after a reshard, of the ranks.
    """
    spec = x.sharding_spec() if spec is None else spec
    described = spec.build_metadata(whole.shape, x.metadata().tensor_properties)
    mine = [each for each in described.shards_metadata if each.placement.rank() == rank_here()]
    shards = x.local_shards()
    return (
        x.shape == whole.shape
        and x.dtype == whole.dtype
        and by_rank(x.metadata()) == by_rank(described)
        and [each.metadata for each in shards] == mine
        and all(same(each.tensor, whole[each.metadata.box.slices]) for each in shards)
    )


def heard(call: Callable[[], Any]) -> list[Event]:
    """Return the collectives that this rank takes part in during a call."""
    events: list[Event] = []
    with listen(events.append):
        call()
    return [event for event in events if event.rank == rank_here()]


def refusal(call: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    """Return the message of the error that a call raises; an empty text if it raises none."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def refused(call: Callable[[], Any], message: str) -> None:
    """Check that a call raises an error with a message like this one."""
    with pytest.raises(ShardedTensorError, match=message):
        call()


def refusals(build: Callable[[int], Any], ranks: int = 3) -> list[str]:
    """Return the messages of all ranks, each of which must refuse `build(rank)`."""
    messages = sw.simulate(lambda: refusal(lambda: build(rank_here())), ranks)
    assert all(messages), messages
    return messages


def refused_alike(build: Callable[[int], Any], *words: str, ranks: int = 3) -> None:
    """Check that all ranks raise the same message, which contains these words."""
    messages = refusals(build, ranks)
    assert len({each.rsplit(" [", 1)[0] for each in messages}) == 1, messages
    for word in words:
        assert word in messages[0]
