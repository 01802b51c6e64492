"""Sharded tensors of local shards and a spec or metadata, made without communication."""

import pytest
import torch
from support.sharded_tensors import (
    chunks,
    heard,
    numbers,
    rank_here,
    refusal,
    refused,
    rows,
    same,
)

import shardwise as sw
from shardwise.sharded import (
    ShardedTensorBase,
    ShardedTensorMetadata,
    TensorProperties,
    init_from_local_shards_and_global_metadata,
    init_from_local_tensor,
)

# ---- of a rank's one tensor


def test_a_local_tensor_is_a_shard_without_communication():
    def run():
        tensor = torch.full((2, 3), float(rank_here()))
        assert heard(lambda: init_from_local_tensor(tensor, chunks(0, 1, 2, 0), 6, 3)) == []
        x = init_from_local_tensor(tensor, chunks(0, 1, 2, 0), 6, 3)
        assert x.local_tensor() is tensor
        assert x.full_tensor()[:, 0].tolist() == [1, 1, 2, 2, 0, 0]

    sw.simulate(run, 3)


def test_a_local_tensor_need_not_be_contiguous():
    whole = numbers([4, 6])

    def run():
        tensor = whole[:, 3 * rank_here() : 3 * rank_here() + 3]
        assert same(init_from_local_tensor(tensor, chunks(1, 0, 1), 4, 6).full_tensor(), whole)

    sw.simulate(run, 2)


def test_a_local_tensor_of_another_size_or_for_several_shards_is_refused():
    def run():
        tensor = torch.zeros(2, 3)
        refused(lambda: init_from_local_tensor(tensor, chunks(0, 0, 1), 6, 3), "shard_sizes")
        refused(
            lambda: init_from_local_tensor(tensor, chunks(0, 0, 0, 1, 1), 8, 3),
            "expected one shard for each rank, this one gets 2",
        )
        refused(lambda: init_from_local_tensor(tensor, "rows", 4, 3), "expected a ShardingSpec")
        refused(lambda: init_from_local_tensor([1], chunks(0, 0, 1), 4), "expected a tensor")

    sw.simulate(run, 2)


# ---- of the metadata of all


def described(dtype=torch.float32):
    shards = [rows(rank).metadata for rank in range(2)]
    return ShardedTensorMetadata(shards, torch.Size([4, 3]), TensorProperties(dtype))


def test_shards_and_the_metadata_of_all_become_a_tensor_without_communication():
    def run():
        shard = rows(rank_here())

        def build():
            return init_from_local_shards_and_global_metadata([shard], described())

        assert heard(build) == []
        x = build()
        assert x.local_tensor() is shard.tensor
        assert x.sharding_spec() == chunks(0, 0, 1) and x.metadata() == described()

    sw.simulate(run, 2)


def test_the_callers_metadata_stay_the_callers():
    def run():
        metadata = described()
        x = init_from_local_shards_and_global_metadata([rows(rank_here())], metadata)
        x.requires_grad_()
        assert x.metadata().tensor_properties.requires_grad and metadata == described()

    sw.simulate(run, 2)


def with_metadata(change=lambda metadata: None, shards=None, **options):
    """Build from changed metadata and the shards of this rank."""
    metadata = described()
    change(metadata)
    mine = [rows(rank_here())] if shards is None else shards
    return init_from_local_shards_and_global_metadata(mine, metadata, **options)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: with_metadata(shards=[]), "local_shards: expected 1, as many as the metadata"),
        (
            lambda: with_metadata(shards=[rows(rank_here(), offset=1)]),
            r"local_shards\[0\].metadata: expected ShardMetadata\(\[\d, 0\].*got .*\[1, 0\]",
        ),
        (
            lambda: with_metadata(shards=[rows(rank_here(), dtype=torch.int8)]),
            "expected dtype torch.float32, as in the .*; got torch.int8",
        ),
        (
            lambda: with_metadata(shards=[rows(rank_here(), requires_grad=True)]),
            "expected requires_grad False",
        ),
        (
            lambda: with_metadata(lambda metadata: metadata.shards_metadata.clear()),
            "shards_metadata: expected at least one shard",
        ),
        (
            lambda: with_metadata(lambda metadata: metadata.shards_metadata.pop()),
            "nobody holds",
        ),
        (
            lambda: with_metadata(
                lambda metadata: setattr(metadata.tensor_properties, "layout", torch.sparse_coo)
            ),
            "tensor_properties.layout: expected torch.strided",
        ),
        (
            lambda: with_metadata(sharding_spec=chunks(1, 0, 1)),
            "sharding_spec: expected one that cuts",
        ),
        (lambda: with_metadata(sharding_spec="rows"), "expected a ShardingSpec"),
    ],
)
def test_metadata_that_do_not_describe_the_shards_are_refused(build, message):
    sw.simulate(lambda: refused(build, message), 2)


def test_a_base_tensor_has_shards_and_metadata_and_nothing_that_communicates():
    shards = [rows(0)]
    x = ShardedTensorBase._init_from_local_shards_and_global_metadata(shards, described())
    assert type(x) is ShardedTensorBase and x.shape == (4, 3)
    assert x.local_shards() == shards and x.sharding_spec() == chunks(0, 0, 1)
    assert "no elements of its own" in refusal(lambda: x + 1)
