"""The constructor ShardedTensor: the shards of each rank, and refused arguments."""

import pytest
import torch
from support.sharded_tensors import (
    chunks,
    rank_here,
    refusal,
    refused,
    refused_alike,
)

import shardwise as sw
from shardwise.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardedStateError,
    ShardedTensor,
    ShardedTensorError,
    ShardMetadata,
    empty,
    full,
    zeros,
)

# ---- the constructor


@pytest.mark.parametrize("rows", [[3, 4], [1, 3, 3], [1, 2, 2, 2]])
def test_each_rank_holds_the_shards_that_the_spec_gives_it(rows):
    def run():
        x = ShardedTensor(chunks(0, *reversed(range(len(rows)))), 7, 2, dtype=torch.int16)
        (shard,) = x.local_shards()
        assert shard.tensor.shape == (rows[rank_here()], 2)
        assert x.size() == torch.Size([7, 2]) and x.dtype == torch.int16
        assert x.local_tensor() is shard.tensor

    sw.simulate(run, len(rows))


def test_sizes_are_numbers_or_one_sequence():
    def run():
        spec = chunks(0, 0, 1)
        for x in (
            empty(spec, 4, 3),
            empty(spec, [4, 3]),
            empty(spec, torch.Size([4, 3])),
            zeros(spec, (4, 3)),
            full(spec, (4, 3), 1.0),
        ):
            assert x.shape == (4, 3)
        assert full(spec, 4, 1.0).shape == (4,)

    sw.simulate(run, 2)


def test_a_rank_may_hold_nothing():
    def run():
        x = zeros(chunks(0, 2, 0), 4, dtype=torch.float64)
        assert len(x.local_shards()) == (0 if rank_here() == 1 else 1)
        assert x.device == torch.device("cpu") and x.shape == (4,)
        if rank_here() == 1:
            assert "expected one shard on this rank, there are 0" in refusal(x.local_tensor)

    sw.simulate(run, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": torch.sparse_coo}, "layout: expected torch.strided"),
        ({"memory_format": torch.channels_last}, "memory_format: expected torch.contiguous"),
    ],
)
def test_other_layouts_and_memory_formats_are_refused(options, message):
    sw.simulate(lambda: refused(lambda: empty(chunks(0, 0, 1), 4, **options), message), 2)


def test_what_is_no_spec_is_refused():
    with pytest.raises(ShardedTensorError, match="sharding_spec: expected a ShardingSpec"):
        ShardedTensor("rows", 4)


def test_a_placement_on_no_rank_of_the_group_is_refused():
    refused_alike(
        lambda rank: empty(chunks(0, 0, 3), 4),
        "placement: expected a rank of the process group, one of (0, 1, 2); got rank:3/cpu",
    )


def test_a_placement_without_a_rank_is_refused():
    refused_alike(
        lambda rank: empty(ChunkShardingSpec(0, ["cpu"]), 4), "expected a rank or a worker"
    )


def test_a_shard_without_a_placement_is_refused():
    spec = EnumerableShardingSpec([ShardMetadata([0], [4])])
    refused_alike(lambda rank: empty(spec, 4), "expected a placement 'rank:N/device', got None")


def test_pinned_memory_is_refused_where_there_is_no_accelerator():
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    with pytest.raises(ShardedStateError, match="pin_memory: expected an accelerator"):
        empty(chunks(0, 0), 4, pin_memory=True)


@pytest.mark.parametrize("given", ["all", -1])
def test_what_is_no_group_is_refused(given):
    refused(lambda: empty(chunks(0, 0), 4, process_group=given), "expected a ProcessGroup")


def test_a_process_that_is_alone_is_told_how_to_start_others():
    with pytest.raises(ShardedTensorError, match=r"alone: sw\.simulate"):
        zeros(chunks(0, 0, 1), 4)
