"""What code that was written for torch's DTensor reads: _local_tensor, _spec, the constructor."""

import pytest
import torch
from support.rules import full, ranks, split
from torch import nn

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.dtensor.dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta


def test_the_local_tensor_shares_memory_and_has_no_history():
    def run(mesh):
        x = split(full(5, 2), mesh, Shard(0)).requires_grad_()
        local = x._local_tensor
        assert type(local) is torch.Tensor and not local.requires_grad
        assert local.shape == x.to_local().shape
        local.add_(1)
        assert torch.equal(x.full_tensor(), full(5, 2) + 1)
        x._local_tensor = torch.zeros(local.shape)
        assert torch.equal(x.full_tensor(), torch.zeros(5, 2)) and x.requires_grad
        with pytest.raises(sw.LayoutError, match="local_tensor: expected"):
            x._local_tensor = torch.zeros(7, 7)
        with pytest.raises(sw.LayoutError, match="it is one already"):
            x._local_tensor = x

    ranks(run)


def test_the_local_tensor_of_a_part_of_a_split_dim_is_up_to_date():
    def run(mesh):
        x = split(full(4, 2), mesh, Shard(0))
        part = x[1:3]
        x.add_(1)
        assert torch.equal(
            DTensor(part._local_tensor, part._spec).full_tensor(), full(4, 2)[1:3] + 1
        )

    ranks(run)


def test_the_spec_says_what_torchs_says():
    def run(mesh):
        x = split(full(5, 2), mesh, Shard(0), Replicate()).t()
        spec = x._spec
        assert spec.mesh is spec.device_mesh is mesh
        assert spec.placements == (Shard(1), Replicate()) == x.placements
        assert spec.tensor_meta == TensorMeta(torch.Size([2, 5]), (1, 2), torch.float32)
        assert (spec.shape, spec.stride, spec.ndim) == ((2, 5), (1, 2), 2)
        assert (spec.num_shards, spec.num_shards_map, spec.dim_map) == (2, [1, 2], [-1, 0])
        assert spec.sums == [] and spec.is_sharded() and not spec.is_replicated()
        assert spec.shard_order == (ShardOrderEntry(1, (0,)),)
        assert spec == x._spec and hash(spec) == hash(x._spec) and spec._layout is x.mesh_layout
        pending = split(full(2), mesh, Partial(), Replicate())._spec
        assert pending.sums == [0] and pending.shard_order == ()
        made = DTensorSpec.from_dim_map(mesh, [-1, 0], [1])
        assert made.placements == (Shard(1), Partial())
        with pytest.raises(RuntimeError, match="each axis once"):
            DTensorSpec.from_dim_map(mesh, [1, 1], [])
        other = spec.shallow_copy_with_tensor_meta(None)
        with pytest.raises(ValueError, match="tensor_meta"):
            _ = other.shape

    ranks(run, 4, (2, 2))


@pytest.mark.parametrize("order", [None, {0: [1, 0]}])
def test_the_constructor_takes_a_spec_back(order):
    def run(mesh):
        x = sw.distribute_tensor(full(7, 2), mesh, [Shard(0), Shard(0)], shard_order=order)
        again = DTensor(x._local_tensor, x._spec, requires_grad=True)
        assert again.mesh_layout is x.mesh_layout and again.is_leaf and again.requires_grad
        assert torch.equal(again.full_tensor(), full(7, 2))
        assert again.to_local().data_ptr() == x.to_local().data_ptr()
        with pytest.raises(TypeError, match="spec: expected a DTensorSpec"):
            DTensor(x._local_tensor, 3, requires_grad=False)

    ranks(run, 4, (2, 2))


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_the_local_tensor_of_a_parameter_is_a_parameter_as_in_torch(placement):
    def run(mesh):
        weight = nn.Parameter(split(full(4, 2), mesh, placement))
        local = weight.to_local()
        assert isinstance(local, nn.Parameter) and type(local) is torch.Tensor
        assert local.requires_grad and not local.is_leaf
        local.sum().backward()
        assert torch.equal(weight.grad.full_tensor(), torch.ones(4, 2))
        with torch.no_grad():
            alone = weight.to_local()
        assert isinstance(alone, nn.Parameter) and not alone.requires_grad and alone.is_leaf
        plain = weight.detach()
        assert not isinstance(plain.to_local(), nn.Parameter)
        frozen = nn.Parameter(split(full(4, 2), mesh, placement), requires_grad=False)
        assert isinstance(frozen.to_local(), nn.Parameter) and not frozen.to_local().requires_grad

    ranks(run)
