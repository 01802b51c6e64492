"""The names of torch's FSDP2, also those that programs read although they are private, and the
arguments of torch's older `replicate`."""

import inspect

import pytest
import torch
import torch.distributed.fsdp as torchs
from support.fsdp_cases import (
    assert_same,
    batch,
    made,
    mean_square,
    mine,
    on_ranks,
    shard_all,
    train,
)
from support.rules import heard
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate as torchs_replicate
from torch.distributed.fsdp import _fully_shard as torchs_package

import shardwise as sw
from shardwise import fsdp
from shardwise.fsdp import (
    FSDPError,
    FSDPMeshInfo,
    FSDPModule,
    HSDPMeshInfo,
    MixedPrecisionPolicy,
    ReplicateModule,
    ShardPlacementResult,
    fully_shard,
    replicate,
)
from shardwise.fsdp._fully_shard import _fsdp_common, _fsdp_init, _fsdp_state, _fully_shard

# ---- every name, with torch's parameters


@pytest.mark.parametrize("name", [each for each in dir(torchs.FSDPModule) if each[:2] != "__"])
def test_every_method_is_here_with_torchs_parameters(name):
    theirs, ours = getattr(torchs.FSDPModule, name), getattr(FSDPModule, name)
    if callable(theirs) and name != "_apply":
        assert list(inspect.signature(ours).parameters) == list(
            inspect.signature(theirs).parameters
        )


@pytest.mark.parametrize("name", torchs_package.__all__)
def test_every_public_name_is_here(name):
    theirs, ours = getattr(torchs_package, name), getattr(fsdp, name)
    if inspect.isfunction(theirs):
        wanted = inspect.signature(theirs).parameters
        assert list(inspect.signature(ours).parameters)[: len(wanted)] == list(wanted)


def test_replicate_has_torchs_parameters():
    ours = inspect.signature(replicate).parameters
    assert set(inspect.signature(torchs_replicate).parameters) <= set(ours)


# ---- what programs read


def test_the_state_of_a_module_has_what_programs_read_of_torchs():
    def run(mesh):
        model = shard_all(made(), mesh)
        state = _fsdp_state._get_module_fsdp_state(model.layers[0])
        assert state is model.layers[0]._get_fsdp_state() is fully_shard.state(model.layers[0])
        assert isinstance(state, _fsdp_state.FSDPState)
        assert _fsdp_state._get_module_fsdp_state(model.layers[0].norm) is None
        model(mine(batch(), mesh))
        group = state._fsdp_param_group
        assert state._fsdp_param_groups == [group] and group.mesh_info.mesh is mesh
        found = [each.sharded_param for each in group.fsdp_params]
        assert {id(each) for each in found} == {id(each) for each in model.layers[0].parameters()}
        assert all(
            each.unsharded_param.shape == each.sharded_param.shape for each in group.fsdp_params
        )
        model._set_unshard_async_op(True)
        mean_square(model, mine(batch(), mesh)).backward()

    on_ranks(run)


def test_sharded_and_replicated_modules_have_the_classes_of_torch():
    def run(mesh):
        sharded = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh=mesh)
        copies = replicate(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh=mesh)
        assert isinstance(copies, ReplicateModule) and isinstance(copies, FSDPModule)
        assert not isinstance(sharded, ReplicateModule)
        for each in (sharded, copies):
            assert type(each[:1]) is nn.Sequential and len(each[:1]) == 1
        assert _fully_shard.get_cls_to_fsdp_cls()[nn.Sequential] is type(sharded)
        with _fully_shard.disable_fsdp_module_new_init():
            made = type(sharded)()
        assert type(made) is nn.Sequential and "_modules" not in vars(made)
        with pytest.raises(RuntimeError, match="set_all_reduce_hook"):
            copies.register_comm_hook(None, lambda state, bucket: None)
        with pytest.raises(RuntimeError, match="not data-parallel yet"):
            replicate(sharded, mesh=mesh)

    on_ranks(run)


def test_mesh_infos_are_made_and_resolved_as_in_torch():
    def run(mesh):
        info = _fsdp_init._get_mesh_info(mesh)
        assert info == FSDPMeshInfo(mesh, 0)
        assert _fsdp_common.resolve_shard_placement(None, info) == ShardPlacementResult(None, info)
        result = ShardPlacementResult(sw.Shard(1), info)
        assert _fsdp_common.resolve_shard_placement(result, info) is result
        with pytest.raises(ValueError, match="result"):
            _fsdp_common.resolve_shard_placement("first", info)

    on_ranks(run)
    pairs = sw.DeviceMesh.abstract((2, 2), ("a", "b"))
    assert _fsdp_init._get_mesh_info(pairs) == HSDPMeshInfo(pairs, 1, 0)


# ---- settings


class Waits:
    def __init__(self):
        self.count = 0

    def wait(self):
        self.count += 1


def test_the_next_forward_waits_for_the_optimizer():
    def run(mesh):
        model, event = shard_all(made(), mesh), Waits()
        model.set_post_optim_event(event)
        assert event.count == 0
        for _ in range(2):
            model(mine(batch(), mesh))
            assert event.count == 1

    on_ranks(run)


def test_only_sums_in_half_precision():
    def run(mesh):
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        ops = []
        for enable in (False, True):
            model = shard_all(made(), mesh, mp_policy=policy)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(enable)
            mean_square(model, mine(batch(), mesh)).backward()
            ops.append([each.grad.full_tensor() for each in model.parameters()])
        for one, other in zip(*ops, strict=True):
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)

    on_ranks(run)


# ---- torch.distributed._composable.replicate


def test_replicate_takes_the_arguments_that_torchtitan_gives():
    def run(mesh):
        model = replicate(made(), device_mesh=mesh, bucket_cap_mb=100)
        train(model, mine(batch(), mesh))
        assert all(each.placements == (sw.Replicate(),) for each in model.parameters())
        assert_same(model, train(made(), batch()))

    on_ranks(run)


def test_gradients_are_reduced_in_pieces_of_this_size():
    def run(mesh):
        def reductions(**options):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(600, 600, bias=False) for _ in range(4)))
            replicate(model, device_mesh=mesh, **options)
            events, _ = heard(mesh, lambda: model(torch.ones(2, 600)).sum().backward())
            return sum(each.cause.operator == "reduce_gradients" for each in events)

        assert (reductions(bucket_cap_mb=1), reductions(bucket_cap_mb=100)) == (4, 1)

    on_ranks(run)


def test_ignored_modules_keep_plain_parameters():
    def run(mesh):
        model = made()
        replicate(model, [model.head], device_mesh=mesh, device_id=torch.device("cpu"))
        assert not isinstance(model.head.weight, sw.DTensor)
        assert isinstance(model.layers[0].linear.weight, sw.DTensor)

    on_ranks(run)


@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True, "static_graph": True},
        {"broadcast_buffers": False, "init_sync": True, "dim": 0, "device_ids": None},
    ],
)
def test_options_of_ddp_that_are_not_needed_are_accepted(options):
    def run(mesh):
        model = replicate(made(), device_mesh=mesh, **options)
        mean_square(model, mine(batch(), mesh)).backward()

    on_ranks(run)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"init_sync": False}, FSDPError, "init_sync"),
        ({"mixed_precision": object()}, FSDPError, "mp_policy"),
        ({"bucket_cap": 3}, TypeError, "bucket_cap"),
        ({"bucket_cap_mb": 0}, FSDPError, "bucket_cap_mb"),
        ({"bucket_cap_mb": "100"}, FSDPError, "bucket_cap_mb"),
        ({"device_id": "cpu"}, RuntimeError, "device_id"),
        ({"device_id": torch.device("cuda", 0)}, FSDPError, "device_id"),
        ({"mesh": "mesh"}, FSDPError, "mesh and device_mesh"),
    ],
)
def test_other_options_are_refused(options, error, message):
    def run(mesh):
        given = {name: mesh if value == "mesh" else value for name, value in options.items()}
        with pytest.raises(error, match=message):
            replicate(made(), device_mesh=mesh, **given)

    on_ranks(run)


def test_replicate_beside_tensor_parallelism_trains_as_one_process():
    """As torchtitan's `apply_ddp` does: the model is laid out on the other axis first."""

    def run():
        mesh = sw.core.mesh.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        model = made()
        sw.parallel.shard_module(model, mesh["tp"], {"layers.*.linear.*": {"tp": sw.Shard(0)}})
        replicate(model, device_mesh=mesh["dp"], bucket_cap_mb=100)
        rows = batch().chunk(2)[mesh["dp"].get_local_rank()]
        x = sw.distribute_tensor(rows, mesh["tp"], [sw.Replicate()])
        mean_square(model, x).backward()
        wanted = made()
        mean_square(wanted, batch()).backward()
        assert_same(model, wanted)

    sw.simulate(run, 4)
