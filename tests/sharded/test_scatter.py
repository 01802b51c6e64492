"""shard_tensor and shard_parameter: from a tensor that one rank has whole."""

import pytest
import torch
from support.sharded_tensors import (
    DTYPES,
    chunks,
    cut,
    is_cut_of,
    numbers,
    rank_here,
    refusals,
    refused_alike,
)

import shardwise as sw

# ---- of a tensor that one rank has whole


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_specs_cut_a_tensor_of_any_dtype(dtype):
    whole = numbers([5, 4], dtype)

    def run():
        for spec in (
            chunks(0, 2, 0, 1),
            chunks(1, 1, 1, 2),
            cut(([0, 0], [5, 1], 2), ([0, 1], [3, 3], 0), ([3, 1], [2, 3], 2)),
        ):
            assert is_cut_of(spec.shard(whole), whole, spec)

    sw.simulate(run, 3)


@pytest.mark.parametrize("source", range(3))
def test_any_rank_may_be_the_source(source):
    whole = numbers([5])

    def run():
        mine = whole if rank_here() == source else torch.zeros_like(whole)
        assert is_cut_of(chunks(0, 1, 2, 0).shard(mine, src_rank=source), whole)

    sw.simulate(run, 3)


def test_the_source_is_counted_within_the_group():
    whole = numbers([5])

    def run():
        if rank_here() in (1, 3):
            mesh = sw.DeviceMesh("cpu", [1, 3])
            mine = whole if rank_here() == 3 else torch.zeros_like(whole)
            x = chunks(0, 3, 1).shard(mine, src_rank=1, process_group=mesh)
            assert is_cut_of(x, whole)

    sw.simulate(run, 4)


def test_ranks_other_than_the_source_need_no_elements():
    whole = numbers([6, 2])

    def run():
        mine = whole if rank_here() == 1 else whole.to("meta")
        assert is_cut_of(chunks(0, 0, 1, 2).shard(mine, src_rank=1), whole)

    sw.simulate(run, 3)


@pytest.mark.parametrize(
    "whole",
    [
        numbers([]),
        numbers([0]),
        numbers([3, 0]),
        numbers([4, 6]).t(),
        numbers([8, 6])[::2, 1::2],
        numbers([1]).expand(4, 3),
        torch.complex(numbers([4]), numbers([4])).conj(),
    ],
    ids=["0-d", "empty", "empty dim", "transposed", "strided", "expanded", "conjugate"],
)
def test_tensors_of_any_strides_and_sizes_are_cut(whole):
    def run():
        if whole.dim() == 0:
            spec = cut(([], [], 1))
        else:
            spec = chunks(-1, 1, 0)
        x = spec.shard(whole)
        assert is_cut_of(x, whole.resolve_conj(), spec)
        assert all(each.tensor.is_contiguous() for each in x.local_shards())

    sw.simulate(run, 2)


def test_the_shards_of_a_parameter_are_leaves_of_their_own():
    def run():
        whole = numbers([4]).requires_grad_()
        x = chunks(0, 0, 1).shard(whole * 2)
        assert x.requires_grad and x.is_leaf and x.local_tensor().is_leaf
        x.local_tensor().sum().backward()
        assert whole.grad is None and x.grad.local_tensor().tolist() == [1.0, 1.0]

    sw.simulate(run, 2)


def test_a_shard_does_not_share_memory_with_the_tensor_or_with_other_shards():
    def run():
        whole = torch.zeros(4)
        x = cut(([0], [1], 0), ([1], [1], 0), ([2], [2], 1)).shard(whole)
        for shard in x.local_shards():
            shard.tensor.fill_(1)
            assert shard.tensor.untyped_storage().nbytes() == 4 * shard.tensor.numel()
        assert whole.tolist() == [0] * 4

    sw.simulate(run, 2)


def test_sources_that_differ_are_refused_on_all_ranks():
    refused_alike(
        lambda rank: chunks(0, 0, 1).shard(numbers([4]), src_rank=int(rank == 2)),
        "src_rank: expected the same on every rank; rank 0 has 0, rank 2 has 1",
    )


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("tensor.shape", lambda odd: numbers([6 if odd else 4])),
        ("tensor.dtype", lambda odd: numbers([4], torch.int64 if odd else torch.float32)),
        ("tensor.requires_grad", lambda odd: numbers([4]).requires_grad_(odd)),
    ],
)
def test_tensors_that_differ_are_refused_on_all_ranks(name, make):
    refused_alike(
        lambda rank: chunks(0, 0, 1).shard(make(rank == 1)),
        f"{name}: expected the same on every rank; rank 0 has",
        ", rank 1 has",
    )


def test_specs_that_differ_are_refused_on_all_ranks():
    refused_alike(
        lambda rank: chunks(0, *((0, 1) if rank < 2 else (1, 0))).shard(numbers([4])),
        "sharding_spec: expected the same on every rank; rank 0 has",
        "rank 2 has",
    )


def test_a_bad_argument_of_one_rank_is_refused_on_all():
    refused_alike(
        lambda rank: chunks(0, 0, 1).shard(numbers([4]), src_rank=3 if rank == 1 else 0),
        "rank 1: src_rank: expected an index in the process group, from 0 to 2; got 3",
    )
    refused_alike(
        lambda rank: chunks(0, 0, 1).shard(None if rank == 2 else numbers([4])),
        "rank 2: tensor: expected a dense tensor, got None",
    )
    refused_alike(
        lambda rank: chunks(0, 0, 1).shard(numbers([4]).to("meta")),
        "rank 0: tensor: expected elements on the rank that they are taken from",
    )
    refused_alike(
        lambda rank: (chunks(1, 0, 1) if rank == 2 else chunks(0, 0, 1)).shard(numbers([4])),
        "rank 2: dim: expected one of the 1 dims",
    )


def test_a_bad_argument_of_all_ranks_is_refused_without_naming_one():
    (message, *_) = refusals(lambda rank: chunks(2, 0, 1).shard(numbers([4, 4])))
    assert message.startswith("dim: expected one of the 2 dims")
