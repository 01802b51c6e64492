"""init_from_local_shards: ranks that disagree are named in an error on all ranks."""

import pytest
import torch
from support.sharded_tensors import (
    chunks,
    cut,
    numbers,
    rank_here,
    refused_alike,
    rows,
    same,
    shard_at,
)

import shardwise as sw
from shardwise.sharded import (
    Shard,
    ShardedStateError,
    ShardedTensorError,
    ShardMetadata,
    init_from_local_shards,
)

# ---- of shards that each rank has


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shards_become_a_tensor_that_shares_their_memory(ranks):
    def run():
        shard = rows(rank_here())
        x = init_from_local_shards([shard], 2 * ranks, 3)
        assert x.local_tensor() is shard.tensor
        assert x.sharding_spec() == chunks(0, *range(ranks))
        expected = torch.arange(float(ranks)).repeat_interleave(2)[:, None].expand(-1, 3)
        assert torch.equal(x.full_tensor(), expected)

    sw.simulate(run, ranks)


def test_several_shards_on_a_rank_and_none_on_another():
    whole = numbers([4, 3])
    spec = cut(([0, 0], [4, 1], 0), ([0, 1], [1, 2], 2), ([1, 1], [3, 2], 0))

    def run():
        mine = [each for each in spec.shards if each.placement.rank() == rank_here()]
        shards = [Shard(whole[each.box.slices].clone(), each) for each in mine]
        x = init_from_local_shards(shards, [4, 3])
        assert same(x.full_tensor(), whole)
        assert set(x.metadata().shards_metadata) == set(spec.shards)
        assert len(x.local_shards()) == (2, 0, 1)[rank_here()]

    sw.simulate(run, 3)


def test_shards_of_a_subgroup_become_a_tensor():
    def run():
        if rank_here() != 1:
            mesh = sw.DeviceMesh("cpu", [0, 2])
            shard = Shard(torch.ones(2), shard_at([rank_here()], [2], rank_here()))
            x = init_from_local_shards([shard], 4, process_group=mesh)
            assert x.full_tensor().tolist() == [1.0] * 4

    sw.simulate(run, 3)


def test_a_tensor_of_no_dims_is_the_shard_of_one_rank():
    def run():
        mine = [Shard(torch.tensor(7), shard_at([], [], 1))] if rank_here() == 1 else []
        assert init_from_local_shards(mine, ()).full_tensor().item() == 7

    sw.simulate(run, 2)


def test_what_the_shards_require_the_tensor_requires():
    def run():
        x = init_from_local_shards([rows(rank_here(), requires_grad=True)], 4, 3)
        assert x.requires_grad and x.metadata().tensor_properties.requires_grad

    sw.simulate(run, 2)


def test_sizes_that_differ_are_refused():
    refused_alike(
        lambda rank: init_from_local_shards([rows(rank)], 6 if rank < 2 else 7, 3),
        "global_size: expected the same on every rank; rank 0 has (6, 3), rank 2 has (7, 3)",
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dtype", {"dtype": torch.float64}),
        ("requires_grad", {"requires_grad": True}),
    ],
)
def test_properties_that_differ_are_refused_with_both_ranks(name, options):
    refused_alike(
        lambda rank: init_from_local_shards([rows(rank, **(options if rank == 1 else {}))], 6, 3),
        f"expected the same {name} for all; shard 0 of rank 0 has ",
        "shard 0 of rank 1 has ",
    )


def test_layouts_that_differ_are_refused_with_both_ranks():
    def build(rank):
        shard = rows(rank)
        if rank == 2:
            shard.tensor = shard.tensor.to_sparse()
        return init_from_local_shards([shard], 6, 3)

    refused_alike(build, "expected the same layout for all; shard 0 of rank 0", "shard 0 of rank 2")


def test_shards_that_all_are_sparse_are_refused():
    def build(rank):
        shard = rows(rank)
        shard.tensor = shard.tensor.to_sparse()
        return init_from_local_shards([shard], 6, 3)

    refused_alike(build, "expected tensors with layout torch.strided, got torch.sparse_coo")


def test_shards_of_one_rank_that_differ_are_refused_with_both():
    def build(rank):
        shards = [rows(rank)]
        if rank == 1:
            lower = torch.zeros(2, 3, dtype=torch.int8)
            shards = [*shards, Shard(lower, shard_at([4, 0], [2, 3], 1))]
        return init_from_local_shards(shards, 6, 3)

    refused_alike(build, "same dtype", "shard 0 of rank 0", "shard 1 of rank 1", ranks=2)


def test_shards_that_overlap_are_refused_with_both_ranks():
    refused_alike(
        lambda rank: init_from_local_shards([rows(rank, offset=(0, 2, 3)[rank])], 6, 3),
        "(Box[2:4, 0:3] on rank:1/cpu)",
        "(Box[3:5, 0:3] on rank:2/cpu)",
        "overlap in Box[3:4, 0:3]",
    )


def test_shards_that_leave_something_out_are_refused():
    refused_alike(
        lambda rank: init_from_local_shards([rows(rank)], 7, 3),
        "they hold 18 of the 21 elements",
        "nobody holds Box[6:7, 0:3]",
        "rank:2/cpu",
    )


def test_shards_that_reach_outside_are_refused():
    refused_alike(
        lambda rank: init_from_local_shards([rows(rank)], 5, 3), "rank:2/cpu) reaches beyond"
    )


def test_a_shard_with_the_placement_of_another_rank_is_refused():
    def build(rank):
        shard = rows(0 if rank == 1 else rank)
        return init_from_local_shards([shard], 6, 3)

    refused_alike(
        build,
        "rank 1: local_shards[0].metadata.placement: expected this rank, 1; got rank:0/cpu",
    )


def test_a_shard_with_a_placement_in_no_rank_of_the_group_is_refused():
    def build(rank):
        shard = rows(rank)
        if rank == 2:
            shard.metadata.placement = "rank:7/cpu"
            shard = Shard(shard.tensor, ShardMetadata([4, 0], [2, 3], "rank:7/cpu"))
        return init_from_local_shards([shard], 6, 3)

    refused_alike(build, "rank 2: ", "got rank:7/cpu")


def test_a_worker_that_one_rank_alone_names_is_refused_on_all():
    def build(rank):
        place = "trainer/cpu" if rank == 1 else f"rank:{rank}/cpu"
        shard = Shard(torch.zeros(2), ShardMetadata([2 * rank], [2], place))
        return init_from_local_shards([shard], 6)

    kinds = []

    def run():
        with pytest.raises(ShardedStateError, match=r"rank 1: .*names an RPC worker") as found:
            build(rank_here())
        kinds.append(found.type)

    sw.simulate(run, 3)
    assert len(kinds) == 3


def test_shards_of_another_number_of_dims_are_refused_with_both():
    def build(rank):
        shard = rows(rank)
        if rank == 2:
            shard = Shard(torch.zeros(2), shard_at([4], [2], 2))
        return init_from_local_shards([shard], 6, 3)

    refused_alike(build, "(Box[0:2, 0:3] on rank:0/cpu) has 2", "(Box[4:6] on rank:2/cpu) has 1")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(1, 3), "tensor: expected the metadata's shard_sizes [2, 3]"),
        (None, "expected a tensor"),
    ],
)
def test_a_tensor_that_no_longer_fits_its_metadata_is_refused_on_all_ranks(tensor, message):
    def build(rank):
        shard = rows(rank)
        if rank == 1:
            shard.tensor = tensor
        return init_from_local_shards([shard], 6, 3)

    refused_alike(build, "rank 1: ", message)


@pytest.mark.parametrize("bad", [None, "shard", torch.zeros(2, 3), 5])
def test_what_is_no_list_of_shards_on_one_rank_is_refused_on_all(bad):
    refused_alike(
        lambda rank: init_from_local_shards(bad if rank == 1 else [rows(rank)], 6, 3),
        "rank 1: local_shards",
    )


@pytest.mark.parametrize("bad", [["6", 3], [6.0, 3], [-1, 3], [True, 3]])
def test_a_size_that_is_none_on_one_rank_is_refused_on_all(bad):
    refused_alike(
        lambda rank: init_from_local_shards([rows(rank)], bad if rank == 1 else [6, 3]),
        "rank 1: global_size: expected numbers from 0 on",
    )


def test_no_shards_at_all_are_refused():
    refused_alike(lambda rank: init_from_local_shards([], 0), "a shard on at least one rank")


def test_a_shard_is_as_large_as_it_says_and_where_it_says():
    with pytest.raises(ShardedTensorError, match=r"shard_sizes \[2\].*shape \[3\]"):
        Shard(torch.zeros(3), shard_at([0], [2]))
    with pytest.raises(ShardedTensorError, match="device of its placement rank:0/meta"):
        Shard(torch.zeros(2), ShardMetadata([0], [2], "rank:0/meta"))


def test_a_shard_of_a_tensor_and_offsets():
    shard = Shard.from_tensor_and_offsets(torch.zeros(2, 3), [4, 0], 1)
    assert shard.metadata == shard_at([4, 0], [2, 3], 1)


# ---- sizes that nobody knows


@pytest.mark.parametrize("size", [(None, 3), (None, None), (6, None)])
def test_unknown_sizes_are_worked_out_along_the_rows(size):
    counts = (1, 3, 2)

    def run():
        rank = rank_here()
        # The offsets that the ranks give do not count.
        x = init_from_local_shards([rows(rank, counts[rank], offset=0)], *size)
        assert x.shape == (6, 3)
        assert x.full_tensor()[:, 0].tolist() == [0, 1, 1, 1, 2, 2]
        assert x.local_shards()[0].metadata.shard_offsets == [(0, 1, 4)[rank], 0]

    sw.simulate(run, 3)


def test_unknown_sizes_count_several_shards_of_a_rank_and_none():
    def run():
        rank = rank_here()
        shards = [rows(2, count, offset=0) for count in (1, 2)] if rank == 2 else []
        if rank == 0:
            shards = [rows(0, 2)]
        assert init_from_local_shards(shards, None, 3).full_tensor()[:, 0].tolist() == [
            *(0, 0, 2, 2, 2)
        ]

    sw.simulate(run, 3)


def test_unknown_sizes_of_shards_that_do_not_fit_below_each_other_are_refused():
    refused_alike(
        lambda rank: init_from_local_shards([rows(rank, width=3 + (rank == 2))], None, None),
        "expected the same sizes but for dim 0",
        "[2, 3]",
        "of rank 2 [2, 4]",
    )
    refused_alike(
        lambda rank: init_from_local_shards([rows(rank)], None, 4),
        "expected 3 for dim 1, as the shards make up (6, 3); got (None, 4)",
    )
    refused_alike(
        lambda rank: init_from_local_shards([rows(rank)], None), "expected one number per dim"
    )
