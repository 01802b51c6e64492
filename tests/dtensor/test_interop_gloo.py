"""To and from torch's own DTensor on real ranks, without copying."""

import pytest
import torch

import shardwise as sw
from shardwise import Partial, Replicate, Shard

WHOLE = torch.arange(30.0).reshape(6, 5)


def both_ways(placements, shard_order):
    from torch.distributed.tensor import DTensor as TorchDTensor

    mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    ours = sw.distribute_tensor(WHOLE, mesh, placements, shard_order=shard_order)
    theirs = sw.interop.to_torch(ours)
    assert isinstance(theirs, TorchDTensor) and tuple(theirs.shape) == (6, 5)
    assert theirs.to_local().data_ptr() == ours.to_local().data_ptr()
    assert torch.equal(theirs.full_tensor(), WHOLE)
    again = sw.interop.from_torch(theirs)
    assert again.mesh_layout is ours.mesh_layout
    assert again.to_local().data_ptr() == ours.to_local().data_ptr()


@pytest.mark.parametrize(
    "placements, shard_order",
    [
        ([Shard(0), Shard(1)], None),
        ([Shard(1), Replicate()], None),
        ([Partial(), Shard(0)], None),
        ([Shard(0), Shard(0)], None),
        ([Shard(0), Shard(0)], {0: ["tp", "dp"]}),
    ],
)
def test_layouts_survive_the_way_to_torch_and_back(workers4, placements, shard_order):
    workers4.run(both_ways, placements, shard_order)


def gradients():
    mesh = sw.init_device_mesh("cpu", (4,))
    x = sw.distribute_tensor(WHOLE, mesh, [Shard(0)]).requires_grad_()
    (sw.interop.to_torch(x * 2) * 3).sum().full_tensor().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((6, 5), 6.0))
    theirs = sw.interop.to_torch(sw.distribute_tensor(WHOLE, mesh, [Shard(0)])).requires_grad_()
    (sw.interop.from_torch(theirs * 2) * 3).sum().backward()
    assert torch.equal(theirs.grad.full_tensor(), torch.full((6, 5), 6.0))
    leaf = sw.interop.from_torch(theirs)
    assert leaf.is_leaf and leaf.requires_grad


def test_gradients_cross_the_border(workers4):
    workers4.run(gradients)


def test_what_is_no_dtensor_is_refused():
    from shardwise import interop

    with pytest.raises(sw.LayoutError, match="expected torch's DTensor, got Tensor"):
        interop.from_torch(torch.ones(2))
    with pytest.raises(sw.LayoutError, match="expected a shardwise DTensor, got Tensor"):
        interop.to_torch(torch.ones(2))
