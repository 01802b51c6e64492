"""torch's functions of specs, and its contexts: the same answers as torch's, on any mesh."""

import itertools

import pytest
import torch
from support.rules import heard, in_layout, ranks, split, values
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import _utils as torchs
from torch.distributed.tensor._dtensor_spec import DTensorSpec as TorchSpec

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.tensor import _utils as ours
from shardwise.tensor._dtensor_spec import DTensorSpec, TensorMeta
from shardwise.tensor._redistribute import (
    disable_redistribute_transform_optimization,
    redistribute_local_tensor,
    use_min_cost_redistribution_plan,
)
from shardwise.tensor._utils import ExplicitRedistributionContext
from shardwise.tensor.experimental import implicit_replication

TORCHS = {Shard(0): TorchShard(0), Shard(1): TorchShard(1), Replicate(): TorchReplicate()}


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (1, 2), (7, 0), (3, 9)], ids=str)
def test_local_shapes_and_offsets_are_torchs(shape):
    def run(mesh):
        place = list(mesh.get_coordinate())
        for placements in itertools.product(TORCHS, repeat=mesh.ndim):
            found = ours.compute_local_shape_and_global_offset(shape, mesh, placements)
            expected = torchs._compute_local_shape_and_global_offset(
                shape, mesh.shape, place, [TORCHS[each] for each in placements]
            )
            assert found == expected, (placements, place)
            skipped = ours.compute_local_shape_and_global_offset(shape, mesh, placements, True)
            assert skipped == (expected[0], ())

    ranks(run, 3)
    ranks(run, 6, (2, 3))


def test_a_rank_outside_of_the_mesh_holds_nothing():
    def run():
        mesh = sw.DeviceMesh("cpu", [0, 1])
        return ours.compute_local_shape_and_global_offset((4, 4), mesh, [Shard(0)])

    assert sw.simulate(run, 3) == [((2, 4), (0, 0)), ((2, 4), (2, 0)), ((0,), ())]


def test_sizes_and_strides_go_from_global_to_local_and_back():
    def run(mesh):
        whole = torch.empty(4, 8, 4).permute(0, 2, 1)
        placements = [Shard(2), Shard(0)]
        size, stride = ours.compute_local_tensor_info(whole, mesh, placements)
        local = torch.empty_strided(size, stride)
        assert ours.compute_global_tensor_info(local, mesh, placements) == (
            list(whole.shape),
            list(whole.stride()),
        )
        return size, stride

    assert ranks(run, 4, (2, 2)) == [([2, 4, 4], [16, 1, 4])] * 4


def test_the_global_shape_of_uneven_shards_is_asked_of_the_ranks():
    def run(mesh):
        local = split(values(5, 7), mesh, Shard(0), Shard(1)).to_local()
        return ours.compute_global_tensor_shape(local.shape, mesh, [Shard(0), Shard(1)])

    assert ranks(run, 6, (2, 3)) == [torch.Size([5, 7])] * 6


@pytest.mark.parametrize(
    ("stride", "shape"),
    [((12, 4, 1), (2, 3, 4)), ((1, 4, 16), (4, 4, 2)), ((4, 4), (1, 3)), ((), ())],
)
def test_strides_keep_the_order_in_memory(stride, shape):
    assert ours.compute_local_stride(stride, shape) == torchs.compute_local_stride(stride, shape)


@pytest.mark.parametrize("size", [3, (2, 3), [2, 3], ([2, 3],), torch.Size([4]), ()], ids=str)
def test_sizes_are_normalized_as_in_torch(size):
    assert ours.normalize_to_torch_size(size) == torchs.normalize_to_torch_size(size)


def test_the_mesh_of_a_call_is_found_among_its_arguments():
    def run(mesh):
        x = split(values(4), mesh, Shard(0))
        assert ours.try_find_mesh_from_args("op", (1, x)) is mesh
        assert ours.try_find_mesh_from_args("op", ([x, x],)) is mesh
        with pytest.raises(sw.LayoutError, match="arguments of op"):
            ours.try_find_mesh_from_args("op", (1, []))

    ranks(run)


# ---- redistribute_local_tensor

LAYOUTS = [
    (Shard(0), Replicate()),
    (Shard(1), Shard(0)),
    (Shard(0), Shard(0)),
    (Replicate(), Replicate()),
    (Partial(), Shard(1)),
]


@pytest.mark.parametrize("source", LAYOUTS, ids=str)
@pytest.mark.parametrize("target", LAYOUTS[:4], ids=str)
def test_a_shard_moves_from_one_spec_to_another(source, target):
    whole = values(5, 3)

    def run(mesh):
        x = in_layout(whole, mesh, *source)
        meta = TensorMeta(x.shape, x.stride(), x.dtype)
        here, there = DTensorSpec(mesh, source, meta), DTensorSpec(mesh, target, meta)
        moved = redistribute_local_tensor(x.to_local(), here, there, async_op=True)
        assert type(moved) is torch.Tensor
        torch.testing.assert_close(moved, split(whole.detach(), mesh, *target).to_local())
        assert moved.requires_grad

    ranks(run, 4, (2, 2))


def test_a_rank_outside_of_both_meshes_keeps_its_tensor():
    def run():
        mesh = sw.DeviceMesh("cpu", [0, 1])
        meta = TensorMeta(torch.Size([4]), (1,), torch.float32)
        local = torch.ones(2) if mesh.get_coordinate() else torch.ones(0)
        here, there = (DTensorSpec(mesh, (each,), meta) for each in (Shard(0), Replicate()))
        return len(redistribute_local_tensor(local, here, there))

    assert sw.simulate(run, 3) == [4, 4, 0]


def test_the_switches_of_torchs_planner_change_no_values():
    def run(mesh):
        x = split(values(6, 5), mesh, Shard(0), Shard(1))
        plain = x.redistribute(placements=[Shard(1), Replicate()]).to_local()
        for context in (
            use_min_cost_redistribution_plan(),
            use_min_cost_redistribution_plan(enabled=False),
            disable_redistribute_transform_optimization(),
        ):
            with context:
                moved = x.redistribute(placements=[Shard(1), Replicate()]).to_local()
            torch.testing.assert_close(moved, plain)

    ranks(run, 4, (2, 2))


# ---- what is implicit


def test_plain_tensors_are_replicated_within_implicit_replication():
    def run(mesh):
        x = split(values(4), mesh, Shard(0))
        with sw.plain_tensors("error"):
            with implicit_replication():
                y = x + torch.ones(4)
            with pytest.raises(sw.PolicyError):
                x + torch.ones(4)
        return y.placements

    assert ranks(run) == [(Shard(0),)] * 2


def test_implicit_moves_are_refused_warned_of_or_allowed_again():
    def run(mesh):
        x = split(values(4, 4, grad=False), mesh, Shard(0))
        y = split(values(4, 4, grad=False), mesh, Shard(1))
        with ExplicitRedistributionContext():
            with pytest.raises(sw.PolicyError, match=r"x\.redistribute"):
                x + y
            with ExplicitRedistributionContext(enable=False):
                x + y
            with pytest.raises(sw.PolicyError, match=r"x\.redistribute"):
                x + y
        with (
            ExplicitRedistributionContext(mode="warn"),
            pytest.warns(UserWarning, match="must move"),
        ):
            x + y
        x + y
        with pytest.raises(sw.PolicyError, match="mode"):
            ExplicitRedistributionContext(mode="ignore")

    ranks(run)


def test_moves_without_communication_are_refused_only_if_strict():
    def run(mesh):
        x = split(values(4, 4, grad=False), mesh, Shard(0))
        y = split(values(4, 4, grad=False), mesh, Replicate())
        with ExplicitRedistributionContext():
            events, _ = heard(mesh, lambda: x + y)
        assert not events
        with ExplicitRedistributionContext(strict=True), pytest.raises(sw.PolicyError):
            x + y

    ranks(run)


def test_orders_of_axes_are_torchs():
    for placements in itertools.product(TORCHS, repeat=3):
        order = DTensorSpec.compute_default_shard_order(placements)
        expected = TorchSpec.compute_default_shard_order([TORCHS[each] for each in placements])
        assert [tuple(each) for each in order] == [tuple(each) for each in expected]
        assert DTensorSpec.is_default_device_order(order)
        turned = tuple(each._replace(mesh_dims=each.mesh_dims[::-1]) for each in order)
        assert DTensorSpec.is_default_device_order(turned) == (turned == order)


def test_sizes_and_offsets_of_chunks_are_torchs():
    for size, count in itertools.product(range(8), range(1, 5)):
        for rank in range(count):
            mine = Shard.local_shard_size_and_offset(size, count, rank)
            assert mine == TorchShard.local_shard_size_and_offset(size, count, rank)
