"""Sharded tensors beside torch's own on real ranks: ranks outside a group, order of metadata."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._shard.sharded_tensor as torch_tensors
from torch.distributed._shard.sharding_spec import ChunkShardingSpec as TorchChunks

import shardwise.sharded.sharded_tensor as our_tensors
from shardwise.sharded.sharding_spec import ChunkShardingSpec

PLACES = ["rank:1/cpu", "rank:0/cpu"]


def described(x: Any) -> tuple[Any, ...]:
    shards = x.metadata().shards_metadata
    return (
        tuple(x.size()),
        x.dtype,
        len(x.local_shards()),
        [(each.shard_offsets, each.shard_sizes, str(each.placement)) for each in shards],
    )


def made_on_all_ranks() -> list[tuple[Any, Any]]:
    group = dist.new_group([0, 1])  # torch gives other ranks no group, but a number
    pairs = []
    for name in ("zeros", "ones", "empty", "rand", "randn"):
        torch.manual_seed(0)  # torch draws a shard on each rank, of other sizes
        both = [
            getattr(module, name)(spec(0, PLACES), 5, 3, process_group=group)
            for module, spec in ((our_tensors, ChunkShardingSpec), (torch_tensors, TorchChunks))
        ]
        pairs.append(tuple(map(described, both)))
        pairs.append(tuple(described(each.clone()) for each in both))
        pairs.append(tuple(described(torch.zeros_like(each)) for each in both))
        torch.manual_seed(0)
        pairs.append(tuple(described(torch.nn.init.uniform_(each)) for each in both))
    torch.manual_seed(0)  # the ranks are shared with other tests
    return pairs


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_ranks_outside_a_group_get_what_torch_gives_them(workers4) -> None:
    results = workers4.run(made_on_all_ranks)
    for rank, pairs in enumerate(results):
        for ours, theirs in pairs:
            assert ours == theirs
            assert ours[2] == (rank < 2)


def resharded() -> list[tuple[Any, Any]]:
    places = [[f"rank:{rank}/cpu" for rank in order] for order in ((2, 0, 3, 1), (1, 0, 3, 2))]
    first, second = places
    pairs = []
    for dim in (0, 1):
        both = [
            module.ones(spec(0, first), 8, 4).reshard(spec(dim, second))
            for module, spec in ((our_tensors, ChunkShardingSpec), (torch_tensors, TorchChunks))
        ]
        pairs.append(tuple(map(described, both)))
    return pairs


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_metadata_after_a_reshard_is_torchs(workers4) -> None:
    for pairs in workers4.run(resharded):
        for ours, theirs in pairs:
            assert ours == theirs
