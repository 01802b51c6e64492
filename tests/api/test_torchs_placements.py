"""Torch's placements beside ours: equal, instances of ours, and taken by every function."""

import pytest
import torch
import torch.distributed.tensor as theirs
from support.rules import full, ranks, split
from torch import nn
from torch.distributed.tensor.placement_types import _StridedShard as TheirStridedShard

import shardwise as sw
from shardwise import fsdp, interop, parallel
from shardwise.core.placement import _StridedShard

PAIRS = [
    (sw.Shard(1), theirs.Shard(1)),
    (sw.Replicate(), theirs.Replicate()),
    (sw.Partial(), theirs.Partial()),
    (sw.Partial("max"), theirs.Partial("max")),
    (_StridedShard(0, split_factor=2), TheirStridedShard(0, split_factor=2)),
]


@pytest.mark.parametrize(("ours", "torchs"), PAIRS, ids=str)
def test_they_are_equal_in_both_directions(ours, torchs):
    for _ in range(3):  # torch's own comparison finds them equal the first time only
        assert ours == torchs and torchs == ours
        assert ours == torchs and torchs == ours
    assert hash(ours) == hash(torchs) and len({ours, torchs}) == 1
    assert (ours,) == (torchs,) and [torchs] == [ours] and {torchs: 1}[ours] == 1
    assert interop.placement_to_torch(ours) == torchs
    assert type(interop.placement_to_torch(ours)) is type(torchs)


def test_others_differ_in_both_directions():
    for at, (ours, _) in enumerate(PAIRS):
        for other, (_, torchs) in enumerate(PAIRS):
            assert (ours == torchs) is (torchs == ours) is (at == other)
    assert theirs.Shard(0) != sw.Shard(1) and sw.Shard(1) != theirs.Shard(0)
    assert theirs.Shard(0) != sw.Shard(0, pieces=2) and theirs.Shard(0) != 0
    with pytest.raises(sw.LayoutError, match="cut in pieces"):
        interop.placement_to_torch(sw.Shard(0, pieces=2))


def test_torchs_are_instances_of_ours():
    kinds = sw.Placement, sw.Shard, _StridedShard, sw.Replicate, sw.Partial
    for ours, torchs in PAIRS:
        assert [isinstance(torchs, each) for each in kinds] == [
            isinstance(ours, each) for each in kinds
        ]
    assert not isinstance(sw.Shard(0), theirs.Shard)  # C++ would read its memory as torch's
    assert not isinstance(3, sw.Placement)


def test_every_function_takes_torchs():
    shard, whole, pending = theirs.Shard(0), theirs.Replicate(), theirs.Partial()

    def run(mesh):
        x = sw.distribute_tensor(full(4, 4), mesh, [shard])
        assert x.placements == (shard,) and (shard,) == x.placements
        assert sw.DTensor.from_local(x.to_local(), mesh, [shard]).shape == (4, 4)
        assert x.redistribute(placements=[theirs.Shard(1)]).placements == (sw.Shard(1),)
        assert sw.zeros(4, device_mesh=mesh, placements=[shard]).placements == (sw.Shard(0),)
        assert sw.Layout.from_placements(mesh, (4, 4), [pending]).partial == ((0, "sum"),)
        y = split(full(4, 4), mesh, whole).requires_grad_()
        y.to_local(grad_placements=[pending]).sum().backward()
        assert torch.equal(y.grad.full_tensor(), torch.full((4, 4), 2.0))
        local = torch.ones(4, 4, requires_grad=True)
        sw.DTensor.from_local(local, mesh, [whole], grad_placements=[pending]).sum().backward()
        assert torch.equal(local.grad, torch.full((4, 4), 0.5))
        doubled = sw.local_map(lambda z: z * 2, out_placements=[shard], in_placements=([shard],))
        assert torch.equal(doubled(x).full_tensor(), full(4, 4) * 2)
        both = sw.local_map(lambda z: z * 2, out_placements=(shard,), in_placements=([shard],))
        assert torch.equal(both(x).full_tensor(), full(4, 4) * 2)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        plan = {
            "0": parallel.ColwiseParallel(input_layouts=whole, output_layouts=theirs.Shard(-1)),
            "1": parallel.RowwiseParallel(input_layouts=theirs.Shard(-1), output_layouts=whole),
        }
        parallel.parallelize_module(model, mesh, plan)
        assert model(full(4, 4)).shape == (4, 4)
        ready = parallel.PrepareModuleInput(
            input_layouts=(shard,), desired_input_layouts=(whole,), use_local_output=True
        )
        prepared = parallel.parallelize_module(nn.Identity(), mesh, ready)
        assert prepared(torch.ones(2, 4)).shape == (4, 4)
        sharded = fsdp.fully_shard(
            nn.Linear(4, 4), mesh=mesh, shard_placement_fn=lambda p: theirs.Shard(p.dim() - 1)
        )
        assert sharded.weight.placements == (sw.Shard(1),)

    ranks(run)
