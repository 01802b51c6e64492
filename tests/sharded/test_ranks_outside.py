"""Ranks outside a process group have the tensor's description and none of its shards."""

import pytest
import torch
from support.sharded_tensors import chunks, numbers, rank_here
from torch import nn

import shardwise as sw
from shardwise import sharded
from shardwise.sharded import (
    ShardedStateError,
    ShardedTensor,
    init_from_local_shards_and_global_metadata,
    init_from_local_tensor,
)

SPEC = chunks(0, 1, 0)


def pair():
    return sw.DeviceMesh("cpu", [0, 1])


def test_factories_make_a_tensor_without_shards():
    def run():
        for make in (sharded.zeros, sharded.ones, sharded.empty, sharded.rand, sharded.randn):
            x = make(SPEC, 5, 3, process_group=pair(), dtype=torch.float64)
            assert isinstance(x, ShardedTensor)
            assert x.shape == (5, 3)
            assert x.dtype == torch.float64
            assert len(x.local_shards()) == (rank_here() < 2)
            assert [str(each.placement) for each in x.metadata().shards_metadata] == [
                "rank:1/cpu",
                "rank:0/cpu",
            ]
        return sharded.full(SPEC, (5, 3), 7.0, process_group=pair()).metadata()

    first, *others = sw.simulate(run, 4)
    assert all(each == first for each in others)


def test_shards_and_tensors_of_the_group_make_one_there_too():
    def run():
        whole = numbers((5, 3))
        made = sharded.ones(SPEC, 5, 3, process_group=pair(), dtype=torch.float64)
        shards = made.local_shards()
        again = init_from_local_shards_and_global_metadata(
            shards, made.metadata(), process_group=pair()
        )
        assert len(again.local_shards()) == (rank_here() < 2)
        piece = {0: whole[3:], 1: whole[:3]}.get(rank_here(), whole[:0])
        of_tensor = init_from_local_tensor(piece, SPEC, 5, 3, process_group=pair())
        assert len(of_tensor.local_shards()) == (rank_here() < 2)
        if rank_here() < 2:
            assert torch.equal(of_tensor.full_tensor(), whole)

    sw.simulate(run, 3)


def test_what_needs_no_communication_runs_there():
    def run():
        x = sharded.ones(SPEC, 5, 3, process_group=pair(), requires_grad=True)
        for y in (x.clone(), x.detach(), torch.zeros_like(x), x + 1, x * x, -x):
            assert y.shape == (5, 3)
            assert len(y.local_shards()) == (rank_here() < 2)
        nn.init.constant_(x, 3.0)
        nn.init.uniform_(x)
        assert "5, 3" in repr(x)
        assert nn.Parameter(x.detach()).shape == (5, 3)

    sw.simulate(run, 3)


def test_generators_stay_alike_on_all_ranks():
    def run():
        torch.manual_seed(1)
        x = sharded.rand(SPEC, 5, 3, process_group=pair())
        nn.init.normal_(x)
        return torch.rand(1).item()  # of the default generator

    assert len(set(sw.simulate(run, 4))) == 1


@pytest.mark.parametrize(
    "communicate",
    [
        lambda x: x.full_tensor(),
        lambda x: x.gather(0, None),
        lambda x: x.reshard(chunks(1, 0, 1)),
        torch.sum,
        lambda x: torch.equal(x, x),
    ],
)
def test_what_communicates_says_that_the_rank_is_outside(communicate):
    def run():
        x = sharded.ones(SPEC, 5, 3, process_group=pair())
        if rank_here() == 2:
            with pytest.raises(ShardedStateError, match="outside the process group"):
                communicate(x)

    sw.simulate(run, 3)
