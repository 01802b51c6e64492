"""Each bad argument of fully_shard and replicate has its own clear error, and changes nothing."""

import pytest
import torch
from support.fsdp_cases import WIDTH, Block, Net, batch, made, on_ranks
from torch import nn

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.core.mesh import init_device_mesh
from shardwise.fsdp import (
    AllGather,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPError,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    StateError,
    fully_shard,
    register_fsdp_forward_method,
    replicate,
    share_comm_ctx,
)


def refused(call, *parts, kind=sw.ShardwiseError):
    """A call that raises an error whose message has all these parts in it."""
    with pytest.raises(kind) as error:
        call()
    for part in parts:
        assert part in str(error.value)


def unchanged(model, call, *parts, kind=FSDPError):
    """The same, and the model is as before."""
    kinds = [type(each) for each in model.modules()]
    before = dict(model.named_parameters())
    marks = {name: dict(vars(each)) for name, each in before.items()}
    refused(call, *parts, kind=kind)
    assert [type(each) for each in model.modules()] == kinds
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    for name, parameter in after.items():
        assert parameter is before[name] and vars(parameter) == marks[name]
    assert not any(hasattr(each, "_fsdp_group") for each in model.modules())


# ---- the module


@pytest.mark.parametrize("shard", [fully_shard, replicate])
def test_what_is_not_a_module_that_is_called(shard):
    name = shard.__name__

    def run(mesh):
        model = made()
        layers = model.layers
        refused(lambda: shard(layers, mesh=mesh), name, "ModuleList", "no forward", "one list")
        table = nn.ModuleDict({"a": nn.Linear(2, 2)})
        refused(lambda: shard(table, mesh=mesh), name, "ModuleDict", "no forward")
        refused(lambda: shard([model, layers], mesh=mesh), name, "ModuleList")
        refused(lambda: shard([], mesh=mesh), name, "empty list")
        refused(lambda: shard("model", mesh=mesh), name, "expected a module", "str")
        refused(lambda: shard([model, None], mesh=mesh), name, "expected a module", "NoneType")
        refused(lambda: shard(model.parameters, mesh=mesh), name, "expected a module", "method")
        unchanged(model, lambda: shard([model, layers], mesh=mesh), "ModuleList")

    on_ranks(run)


def test_a_module_is_sharded_once():
    def run(mesh):
        model = made()
        layer = fully_shard(model.layers[0], mesh=mesh)
        refused(lambda: fully_shard(layer, mesh=mesh), "FSDPBlock", "not data-parallel yet", "once")
        refused(lambda: replicate(layer, mesh=mesh), "FSDPBlock", "not data-parallel yet")
        refused(lambda: fully_shard([model.head, model.head], mesh=mesh), "Linear", "twice")
        assert not isinstance(model.head, FSDPModule)
        inner = [model, model.layers[0]]
        refused(lambda: fully_shard(inner, mesh=mesh), "FSDPBlock", "not data-parallel yet")
        assert type(model) is Net

    on_ranks(run)


def test_outer_modules_come_last():
    def run(mesh):
        model = fully_shard(made(), mesh=mesh)
        for when in ("before a forward", "after one"):
            refused(
                lambda: fully_shard(model.layers[0], mesh=mesh),
                "norm.weight",
                "inner modules first",
            )
            assert type(model.layers[0]) is Block, when
            model(batch())

    on_ranks(run)


def test_lazy_modules():
    def run(mesh):
        model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
        unchanged(
            model, lambda: fully_shard(model, mesh=mesh), "1.weight", "lazy", "run a forward first"
        )
        model(torch.ones(1, 2))
        fully_shard(model, mesh=mesh)(torch.ones(1, 2))

    on_ranks(run)


def test_meta_parameters_are_named_at_the_first_forward():
    def run(mesh):
        with torch.device("meta"):
            model = Net()
        fully_shard(model, mesh=mesh)
        refused(lambda: model(batch().float()), "layers.0.norm.weight", "to_empty", kind=StateError)

    on_ranks(run)


# ---- the mesh


def test_unknown_and_unfitting_axes():
    def run():
        model = made()
        mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        refused(lambda: fully_shard(model, mesh=mesh["nope"]), "'nope'", "dp", "tp")

        def named(**dims):
            return lambda: fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))

        unchanged(model, named(shard="nope"), "'nope'", "dp", "tp", kind=sw.ShardwiseError)
        unchanged(model, named(replicate="nope"), "'nope'", kind=sw.ShardwiseError)
        unchanged(model, named(shard=("dp", "nope")), "'nope'", kind=sw.ShardwiseError)
        unchanged(model, named(shard="dp", replicate="dp"), "'dp'", kind=sw.ShardwiseError)
        unchanged(model, named(shard=3), "shard", "3")
        unchanged(model, named(shard=()), "shard", "()")
        refused(DataParallelMeshDims, "shard", "replicate", "neither")
        unchanged(
            model,
            lambda: fully_shard(model, mesh=mesh, dp_mesh_dims="dp"),
            "dp_mesh_dims",
            "DataParallelMeshDims",
            "'dp'",
        )
        unchanged(model, lambda: replicate(model, mesh=mesh), "1 axis", "mesh['dp']")
        unchanged(
            model, lambda: fully_shard(model, mesh="dp"), "mesh", "'dp'", kind=sw.ShardwiseError
        )

    sw.simulate(run, 4)


def test_a_mesh_of_three_axes_and_one_of_other_ranks():
    def run():
        model = made()
        deep = init_device_mesh("cpu", (2, 1, 2), ("pp", "dp", "tp"))
        unchanged(
            model, lambda: fully_shard(model, mesh=deep), "1 axis (FSDP) or 2 (HSDP", "mesh['dp']"
        )
        rank = deep.get_rank()
        others = sw.DeviceMesh("cpu", [2, 3] if rank < 2 else [0, 1], mesh_dim_names=("dp",))
        unchanged(
            model, lambda: fully_shard(model, mesh=others), f"rank {rank}", "its own data-parallel"
        )
        unchanged(model, lambda: replicate(model, mesh=others), f"rank {rank}", "replicate")
        fully_shard(model, mesh=deep["dp", "tp"])

    sw.simulate(run, 4)


def test_a_mesh_of_more_ranks_than_there_are():
    def run():
        def wide():
            fully_shard(made(), mesh=sw.DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",)))

        refused(wide, "mesh: expected ranks 0 to 1, got 0 to 3")

    sw.simulate(run, 2)


def test_dtensors_that_do_not_fit_beside_the_mesh():
    def run():
        mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))

        def on(where, *placements):
            model = nn.Linear(4, 4)
            model.weight = nn.Parameter(sw.distribute_tensor(model.weight, where, placements))
            return model

        model = on(mesh["dp"], Shard(0))
        unchanged(model, lambda: fully_shard(model, mesh=mesh["dp"]), "weight", "mesh['tp']")
        model = on(mesh, Replicate(), Shard(0))
        unchanged(
            model, lambda: fully_shard(model, mesh=mesh["dp"]), "weight", "axis 'dp'", "mesh['tp']"
        )
        model = on(init_device_mesh("cpu", (4,), ("other",)), Shard(0))
        unchanged(model, lambda: fully_shard(model, mesh=mesh["dp"]), "weight", "no mesh has both")
        model = nn.Linear(4, 4)
        pending = sw.DTensor.from_local(torch.ones(4, 4), mesh["tp"], [Partial()])
        model.weight = nn.Parameter(pending)
        unchanged(model, lambda: fully_shard(model, mesh=mesh["dp"]), "weight", "pending sums")

    sw.simulate(run, 4)


def test_tied_parameters_on_two_meshes():
    def run():
        mesh = init_device_mesh("cpu", (2, 2), ("a", "b"))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        fully_shard(model[0], mesh=mesh["a"])
        refused(lambda: fully_shard(model[1], mesh=mesh["b"]), "weight", "tied", "the same mesh")
        assert type(model[1]) is nn.Linear and type(model[1].bias) is nn.Parameter

    sw.simulate(run, 4)


def test_tied_parameters_in_two_dtypes():
    def run(mesh):
        model = made()
        model.layers[1].linear.weight = model.layers[0].linear.weight
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(model.layers[0], mesh=mesh, mp_policy=half)
        fully_shard(model, mesh=mesh)
        refused(lambda: model(batch()), "linear.weight", "layers.0", "bfloat16", "need the same")

    on_ranks(run)


# ---- the other arguments


@pytest.mark.parametrize("value", [-1, 0, 3, 8, 2.0, "2", [2]])
def test_reshard_sizes_that_do_not_divide_the_shard_axis(value):
    def run(mesh):
        model = made()
        unchanged(
            model,
            lambda: fully_shard(model, mesh=mesh, reshard_after_forward=value),
            "reshard_after_forward",
            "divides 4",
            repr(value),
        )

    on_ranks(run, 4)


@pytest.mark.parametrize(
    ("result", "parts"),
    [
        (Partial(), ["Shard(dim), Replicate() or None", "Partial"]),
        (Shard(2), ["2"]),
        (Shard(-2), ["-2"]),
        ("rows", ["'rows'"]),
        (0, ["0"]),
    ],
)
def test_placements_that_a_parameter_cannot_have(result, parts):
    def run(mesh):
        model = made()

        def placement(parameter):
            return result if parameter is model.layers[1].linear.bias else None

        unchanged(
            model,
            lambda: fully_shard(model, mesh=mesh, shard_placement_fn=placement),
            "shard_placement_fn: layers.1.linear.bias",
            *parts,
            kind=sw.ShardwiseError,
        )

    on_ranks(run)


def test_a_placement_function_that_raises_or_is_no_function():
    def run(mesh):
        model = made()

        def placement(parameter):
            raise KeyError("mine")

        unchanged(
            model,
            lambda: fully_shard(model, mesh=mesh, shard_placement_fn=placement),
            "mine",
            kind=KeyError,
        )
        unchanged(
            model,
            lambda: fully_shard(model, mesh=mesh, shard_placement_fn=Shard(0)),
            "shard_placement_fn",
            "a function of a parameter",
            "Shard(0)",
        )

    on_ranks(run)


@pytest.mark.parametrize("shard", [fully_shard, replicate])
def test_policies_and_ignored_parameters_of_the_wrong_type(shard):
    def run(mesh):
        model = made()

        def given(**options):
            return lambda: shard(model, mesh=mesh, **options)

        unchanged(model, given(mp_policy=torch.bfloat16), "mp_policy", "MixedPrecisionPolicy")
        unchanged(model, given(mp_policy=MixedPrecisionPolicy), "mp_policy")
        unchanged(model, given(offload_policy=True), "offload_policy", "OffloadPolicy", "True")
        unchanged(model, given(offload_policy=CPUOffloadPolicy), "offload_policy")
        names = {"head.weight"}
        unchanged(model, given(ignored_params=names), "ignored_params", "names are not enough")
        unchanged(model, given(ignored_params="head.weight"), "ignored_params", "names")
        unchanged(model, given(ignored_params=model.head), "ignored_params", "parameters", "Linear")
        refused(lambda: MixedPrecisionPolicy(param_dtype="bf16"), "param_dtype", "'bf16'")
        refused(lambda: MixedPrecisionPolicy(reduce_dtype=torch.int32), "reduce_dtype", "int32")
        refused(lambda: MixedPrecisionPolicy(cast_forward_inputs=1), "cast_forward_inputs", "1")
        refused(lambda: CPUOffloadPolicy(pin_memory="yes"), "pin_memory", "'yes'")
        shard(model, mesh=mesh, ignored_params=[model.head.weight], offload_policy=OffloadPolicy())
        assert type(model.head.weight) is nn.Parameter and model.head.weight.shape == (3, WIDTH)
        assert type(model.head.bias) is sw.DTensor
        model(batch())

    on_ranks(run)


# ---- setters


SETTERS = {
    "set_requires_gradient_sync": "requires_gradient_sync",
    "set_requires_all_reduce": "requires_all_reduce",
    "set_reshard_after_forward": "reshard_after_forward",
    "set_reshard_after_backward": "reshard_after_backward",
    "set_unshard_in_backward": "unshard_in_backward",
    "set_is_last_backward": "is_last_backward",
    "set_force_sum_reduction_for_comms": "enable",
    "set_reduce_scatter_unused_params": "reduce_scatter_unused_params",
    "set_keep_unsharded_storage": "keep",
    "set_manual_backward_finalization": "enabled",
    "set_allocate_memory_from_process_group_for_comm": "enable",
}


@pytest.mark.parametrize("name", SETTERS)
def test_setters_that_take_a_truth_value_take_nothing_else(name):
    def run(mesh):
        model = fully_shard(made(), mesh=mesh)
        before = model._fsdp_group.settings
        for value in (1, None, "yes"):
            refused(
                lambda value=value: getattr(model, name)(value),
                SETTERS[name],
                "True or False",
                repr(value),
            )
        assert model._fsdp_group.settings is before

    on_ranks(run)


def test_setters_that_take_something_else():
    def run(mesh):
        model = fully_shard(made(), mesh=mesh)
        for factor in (0, "2", None, True, float("nan")):
            refused(
                lambda factor=factor: model.set_gradient_divide_factor(factor),
                "factor",
                repr(factor),
            )
        refused(lambda: model.set_all_reduce_hook(3), "hook", "3")
        refused(lambda: model.set_custom_all_gather(max), "comm", "AllGather")
        refused(lambda: model.set_custom_all_gather(AllGather), "comm", "AllGather")
        refused(lambda: model.set_custom_reduce_scatter(max), "comm", "ReduceScatter")
        refused(lambda: model.set_post_optim_event(3), "event", "torch.Event", "int")
        refused(lambda: model.set_symm_mem_for_comm("NVSHMEM"), "backend", "'NVSHMEM'")
        refused(lambda: model.finalize_backward(async_op=1), "async_op", "True or False")
        for setter in (
            model.set_modules_to_forward_prefetch,
            model.set_modules_to_backward_prefetch,
        ):
            refused(lambda setter=setter: setter(model), "modules", "a list", "FSDPNet")
            refused(lambda setter=setter: setter([model, model.head]), "modules[1]", "Linear")
            refused(lambda setter=setter: setter(3), "modules", "a list", "int")
        refused(lambda: share_comm_ctx([model, model.head]), "modules[1]", "Linear")
        refused(lambda: share_comm_ctx(model), "modules", "a list", "FSDPNet")
        refused(lambda: register_fsdp_forward_method(model, "nope"), "method_name", "'nope'")
        refused(lambda: register_fsdp_forward_method(model, 3), "method_name", "3")

    on_ranks(run)


def test_memory_for_communication_is_not_chosen_beside_custom_communication():
    class Gathers(AllGather):
        def allocate(self, size, *, dtype, device):
            return torch.empty(size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            raise NotImplementedError

    def run(mesh):
        model = fully_shard(made(), mesh=mesh)
        refused(model.set_symm_mem_for_comm, "set_symm_mem_for_comm", "set_custom_all_gather")
        model.set_allocate_memory_from_process_group_for_comm(True)
        model(batch())
        model.set_custom_all_gather(Gathers())
        refused(model.set_symm_mem_for_comm, "set_symm_mem_for_comm", "Gathers")
        for enable in (True, False):
            refused(
                lambda enable=enable: model.set_allocate_memory_from_process_group_for_comm(enable),
                "set_allocate_memory_from_process_group_for_comm",
                "Gathers",
            )

    on_ranks(run)


def test_replicas_are_not_split():
    def run():
        mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        model = made()
        for dims in (DataParallelMeshDims(shard="dp"), DataParallelMeshDims("dp", "tp")):
            unchanged(
                model,
                lambda dims=dims: replicate(model, mesh=mesh, dp_mesh_dims=dims),
                "dp_mesh_dims",
                "shard",
                "fully_shard",
            )
        unchanged(
            model, lambda: replicate(model, mesh=mesh, dp_mesh_dims="dp"), "dp_mesh_dims", "'dp'"
        )

    sw.simulate(run, 4)
