"""The training state, parameter state and mesh information of sharded modules."""

import dataclasses

import pytest
from support.fsdp_cases import (
    Net,
    assert_at_rest,
    assert_close,
    assert_same,
    batch,
    full,
    kinds,
    made,
    mean_square,
    mine,
    on_ranks,
    shard_all,
    sharded,
    train,
)
from support.rules import heard
from torch import nn

import shardwise as sw
from shardwise.core.mesh import init_device_mesh
from shardwise.fsdp import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPError,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardedState,
    StateError,
    TrainingState,
    UnshardHandle,
    fully_shard,
    replicate,
    share_comm_ctx,
)
from shardwise.fsdp.errors import transition

# ---- unshard and reshard


def test_unshard_with_and_without_a_handle():
    def run(mesh):
        model = sharded(mesh)
        layer = model.layers[0]
        layer.set_modules_to_forward_prefetch([])
        assert layer.unshard() is None
        assert type(layer.linear.weight) is nn.Parameter
        assert_close(layer.linear.weight.detach(), made().layers[0].linear.weight.detach())
        assert type(model.layers[1].linear.weight) is sw.DTensor  # not of other groups
        assert layer._fsdp_group.units[0].state is ShardedState.UNSHARDED
        assert kinds(mesh, lambda: layer(batch())) == []
        layer.reshard()
        layer.reshard()  # nothing is left to do
        assert_at_rest(model)
        events, handle = heard(mesh, lambda: layer.unshard(async_op=True))
        assert isinstance(handle, UnshardHandle) and [each.kind for each in events] == [
            "all_gather"
        ]
        assert type(layer.linear.weight) is sw.DTensor
        handle.wait()
        handle.wait()
        assert type(layer.linear.weight) is nn.Parameter
        layer.reshard()
        handle = layer.unshard(async_op=True)
        assert kinds(mesh, lambda: layer(batch())) == []  # forward waits for it
        layer.unshard(async_op=True)
        layer.reshard()  # before it is there
        assert_at_rest(layer)
        train(model, mine(batch(), mesh))
        assert_same(model, train(made(), batch()))

    on_ranks(run)


def test_a_handle_waited_for_after_the_parameters_were_given_back_does_nothing():
    def run(mesh):
        model = sharded(mesh)
        layer = model.layers[0]
        handle = layer.unshard(async_op=True)
        layer.reshard()
        handle.wait()
        assert_at_rest(model)
        for parameter in layer.parameters():
            full(parameter)

    on_ranks(run)


# ---- schedules


def test_modules_that_nobody_calls_together_may_share_a_schedule():
    def step(stages, x):
        for stage in stages:
            x = stage(x)
        x.square().mean().backward()

    plain = made()
    step([*plain.layers, plain.head], batch())

    def run(mesh):
        model = made()
        stages = [fully_shard(each, mesh=mesh) for each in (*model.layers, model.head)]
        for stage in stages:
            stage.set_reshard_after_forward(True)
        share_comm_ctx(stages)
        step(stages, mine(batch(), mesh))
        assert_same(model, plain)
        assert len({id(stage._fsdp_group.schedule) for stage in stages}) == 1
        assert_at_rest(model)

    on_ranks(run)


def test_reset_iter_state_ends_what_an_exception_has_left():
    class Fails(Net):
        def forward(self, x):
            output = super().forward(x)
            output.register_hook(self.fail)
            return output

        def fail(self, gradient):
            raise OSError("in backward")

    def run(mesh):
        model = shard_all(made(Fails), mesh)
        model.reset_iter_state()  # nothing has run yet
        with pytest.raises(OSError, match="in backward"):
            mean_square(model, mine(batch(), mesh)).backward()
        model.reset_iter_state()
        assert_at_rest(model)
        for module in (model, *model.layers):
            assert module._fsdp_group.state is TrainingState.IDLE

    on_ranks(run)


# ---- states


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (TrainingState.FORWARD, TrainingState.POST_BACKWARD),
        (TrainingState.FORWARD, TrainingState.PRE_BACKWARD),
        (TrainingState.IDLE, TrainingState.POST_BACKWARD),
        (TrainingState.PRE_BACKWARD, TrainingState.FORWARD),
        (ShardedState.SHARDED, ShardedState.SHARDED_POST_FORWARD),
        (ShardedState.SHARDED, ShardedState.SHARDED),
    ],
)
def test_states_that_cannot_follow_are_refused_by_name(before, after):
    with pytest.raises(StateError, match=f"it: .*from {before.name} to {after.name}.*only to"):
        transition(before, after, "it")


def test_the_states_of_a_step():
    def run(mesh):
        model = sharded(mesh, reshard_after_forward=2)
        group = model.layers[1]._fsdp_group
        seen = []

        def look(*_):
            seen.append((group.state.name, group.units[0].state.name))

        model.layers[1].linear.register_forward_hook(look)
        model.layers[2].linear.register_forward_hook(look)
        model.layers[1].linear.register_full_backward_hook(look)
        model.layers[0].linear.register_full_backward_hook(look)
        mean_square(model, mine(batch(), mesh)).backward()
        look()
        assert seen == [
            ("FORWARD", "UNSHARDED"),
            ("IDLE", "SHARDED_POST_FORWARD"),
            ("PRE_BACKWARD", "UNSHARDED"),
            ("POST_BACKWARD", "SHARDED"),
            ("IDLE", "SHARDED"),
        ]

    on_ranks(run, 4)


# ---- meshes


def test_what_a_mesh_info_says():
    def run():
        mesh = init_device_mesh("cpu", (2, 3), ("replicate", "shard"))
        rank = mesh.get_rank()
        row, column = divmod(rank, 3)
        info = fully_shard(nn.Linear(3, 3), mesh=mesh)._fsdp_group.info
        assert type(info) is HSDPMeshInfo and isinstance(info, DataParallelMeshInfo)
        assert (info.replicate_mesh_dim, info.shard_mesh_dim) == (0, 1)
        assert (info.replicate_mesh_size, info.shard_mesh_size, info.size) == (2, 3, 6)
        assert (info.replicate_mesh_rank, info.shard_mesh_rank) == (row, column)
        assert info.shard_ranks == (3 * row, 3 * row + 1, 3 * row + 2)
        assert info.replicate_ranks == (column, column + 3)
        assert info == HSDPMeshInfo(mesh, 1, 0) and hash(info) == hash(HSDPMeshInfo(mesh, 1, 0))
        with pytest.raises(dataclasses.FrozenInstanceError):
            info.shard_mesh_dim = 0
        flat = fully_shard(nn.Linear(3, 3), mesh=mesh["shard"])._fsdp_group.info
        assert type(flat) is FSDPMeshInfo and flat != info
        assert (flat.shard_mesh_size, flat.replicate_mesh_size, flat.size) == (3, 1, 3)
        assert flat.replicate_ranks == (rank,) and flat.replicate_mesh_rank == 0
        with pytest.raises(FSDPError, match=r"FSDPMeshInfo: .*replicate"):
            flat.replicate_communicator("")
        same = replicate(nn.Linear(3, 3), mesh=mesh["replicate"])._fsdp_group.info
        assert type(same) is DDPMeshInfo and same.shard_ranks == (rank,)
        assert (same.replicate_mesh_size, same.replicate_mesh_rank) == (2, row)
        with pytest.raises(FSDPError, match=r"DDPMeshInfo: .*shard"):
            same.shard_communicator("")
        every = fully_shard(nn.Linear(3, 3))._fsdp_group.info  # by default all ranks
        assert every.shard_ranks == tuple(range(6)) and every.mesh.mesh_dim_names == ("dp",)

    sw.simulate(run, 6)


@pytest.mark.parametrize(("names", "replicas"), [("b", 2), (("a", "b"), 4), (("c",), 1)])
def test_the_axes_of_replicas_by_name(names, replicas):
    def run():
        mesh = init_device_mesh("cpu", (2, 2, 1), ("a", "b", "c"))
        dims = DataParallelMeshDims(replicate=names)
        model = replicate(made(), mesh=mesh, dp_mesh_dims=dims)
        info = model._fsdp_group.info
        assert type(info) is DDPMeshInfo and info.replicate_mesh_size == replicas
        train(model, batch())  # the same rows everywhere: the same as one process
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(full(ours), theirs.detach())

    plain = train(made(), batch())
    sw.simulate(run, 4)


@pytest.mark.parametrize(
    ("dims", "kind", "shards", "replicas"),
    [
        (DataParallelMeshDims(shard="a"), FSDPMeshInfo, 2, 1),
        (DataParallelMeshDims(replicate="b"), DDPMeshInfo, 1, 2),
        (DataParallelMeshDims(shard="b", replicate="a"), HSDPMeshInfo, 2, 2),
        (DataParallelMeshDims(shard=("a", "b")), FSDPMeshInfo, 4, 1),
        (DataParallelMeshDims(shard=("b",)), FSDPMeshInfo, 2, 1),
        (DataParallelMeshDims(shard=("a", "b"), replicate="c"), HSDPMeshInfo, 4, 1),
    ],
)
def test_the_data_parallel_axes_of_a_larger_mesh_by_name(dims, kind, shards, replicas):
    def run():
        mesh = init_device_mesh("cpu", (2, 2, 1), ("a", "b", "c"))
        model = shard_all(made(), mesh, dp_mesh_dims=dims)
        info = model._fsdp_group.info
        assert type(info) is kind
        assert (info.shard_mesh_size, info.replicate_mesh_size) == (shards, replicas)
        train(model, batch())  # the same rows everywhere: the same as one process
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(full(ours), theirs.detach())

    plain = train(made(), batch())
    sw.simulate(run, 4)
