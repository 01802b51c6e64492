"""Parameters of one group that are sharded over different ranks (`ShardPlacementResult`), and
descriptions of data-parallel ranks."""

import pytest
import torch
from support.fsdp_cases import assert_close, full, on_ranks
from support.rules import heard
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.core.mesh import init_device_mesh
from shardwise.fsdp import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPError,
    FSDPMeshInfo,
    HSDPMeshInfo,
    MixedPrecisionPolicy,
    ShardPlacementResult,
    fully_shard,
)

# ---- descriptions of data-parallel ranks


def test_hsdp_is_both_fsdp_and_ddp():
    mesh = sw.DeviceMesh.abstract((2, 3), ("replicate", "shard"))
    info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    assert isinstance(info, FSDPMeshInfo) and isinstance(info, DDPMeshInfo)
    assert not isinstance(FSDPMeshInfo(mesh, 0), DDPMeshInfo)
    assert (info.shard_mesh_size, info.replicate_mesh_size) == (3, 2)
    assert info == HSDPMeshInfo(mesh, 1, 0) and not info.is_spmd_mesh


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (DataParallelMeshInfo, {}),
        (FSDPMeshInfo, {}),
        (FSDPMeshInfo, {"replicate_mesh_dim": 0}),
        (DDPMeshInfo, {}),
        (DDPMeshInfo, {"shard_mesh_dim": 0}),
        (HSDPMeshInfo, {"shard_mesh_dim": 0}),
        (HSDPMeshInfo, {"replicate_mesh_dim": 0}),
        (FSDPMeshInfo, {"shard_mesh_dim": 2}),
        (FSDPMeshInfo, {"shard_mesh_dim": "shard"}),
    ],
)
def test_missing_axes_are_refused(kind, given):
    """With an error that is one of torch's type too."""
    mesh = sw.DeviceMesh.abstract((2, 2), ("replicate", "shard"))
    for error in (AssertionError, FSDPError):
        with pytest.raises(error, match=kind.__name__):
            kind(mesh, **given)


def test_names_of_axes_are_tuples():
    dims = DataParallelMeshDims(shard=("a", "b"), replicate="c")
    assert dims.shard_names == ("a", "b") and dims.replicate_names == ("c",)
    assert DataParallelMeshDims(shard="a").replicate_names == ()


# ---- a mesh for each parameter


class Experts(nn.Module):
    """A dense layer, and experts of which each rank along "ep" has its own: it computes with its
    own alone, as after an all-to-all of tokens."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(6, 6)
        self.experts = nn.Parameter(torch.randn(6, 6) / 3)

    def forward(self, x):
        return torch.tanh(self.dense(x)) @ self.experts


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def made():
    torch.manual_seed(0)
    return Net().double()


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator, dtype=torch.float64)


def trained(model, x, steps=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


def placement(experts, info, others=None):
    def function(parameter):
        if any(parameter is each for each in experts):
            return ShardPlacementResult(Shard(1), info)
        return None if others is None else ShardPlacementResult(None, others)

    return function


INFOS = {
    "the same ranks in two axes": lambda mesh: HSDPMeshInfo(
        mesh["replicate", "shard"], shard_mesh_dim=1, replicate_mesh_dim=0
    ),
    "the same": lambda mesh: FSDPMeshInfo(mesh["replicate", "shard"].flatten(name="dp"), 0),
}


@pytest.mark.parametrize("how", INFOS)
@pytest.mark.parametrize("reshard", [True, False, 2])
def test_training_is_that_of_one_process(how, reshard):
    """The experts of a layer are sharded over two ranks and replicated over two, the rest over
    four."""

    def run():
        mesh = init_device_mesh("cpu", (2, 2), ("replicate", "shard"))
        everyone = mesh.flatten(name="all")
        model = made()
        info = INFOS[how](mesh)
        for layer in model.layers:
            fully_shard(
                layer,
                mesh=everyone,
                shard_placement_fn=placement([layer.experts], info),
                reshard_after_forward=reshard,
            )
        fully_shard(model, mesh=everyone)
        experts = model.layers[0].experts
        assert experts.device_mesh is info.mesh and experts.placements[-1] == Shard(1)
        assert model.layers[0].dense.weight.device_mesh is everyone
        rows = batch().chunk(4)[everyone.get_local_rank()]
        trained(model, rows)
        return {name: full(each) for name, each in model.named_parameters()}

    wanted = trained(made(), batch())
    for found in sw.simulate(run, 4):
        for name, each in wanted.named_parameters():
            assert_close(found[name], each.detach(), name)


def test_experts_that_differ_between_ranks():
    """Expert parallelism: a DTensor over "ep", sharded over the ranks with the same experts; the
    rest over all ranks."""

    def run():
        mesh = init_device_mesh("cpu", (2, 2), ("efsdp", "ep"))
        everyone = mesh.flatten(name="fsdp")
        torch.manual_seed(0)
        layer = nn.Module()
        layer.gate = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        whole = torch.randn(4, 3, 4, dtype=torch.float64)  # four experts
        layer.experts = nn.Parameter(sw.distribute_tensor(whole, mesh["ep"], [Shard(0)]))
        info = FSDPMeshInfo(mesh=mesh["efsdp"], shard_mesh_dim=0)
        layer.forward = lambda x: (x @ layer.gate, layer.experts)
        fully_shard(layer, mesh=everyone, shard_placement_fn=placement([layer.experts], info))
        assert layer.experts.device_mesh.mesh_dim_names == ("efsdp", "ep")
        hidden, experts = layer(torch.ones(2, 4, dtype=torch.float64))
        assert experts.device_mesh is mesh["ep"] and experts.shape == (4, 3, 4)
        assert torch.equal(experts.full_tensor(), whole)
        mine = experts.to_local()
        scale = 1.0 + mesh["efsdp"].get_local_rank()
        (hidden.sum() + (scale * mine).sum()).backward()
        assert_close(layer.experts.grad.full_tensor(), torch.full_like(whole, 1.5))
        assert_close(full(layer.gate.grad), torch.full((4, 4), 2.0, dtype=torch.float64))

    sw.simulate(run, 4)


def test_mixed_precision_accumulation_and_clipping():
    def run():
        mesh = init_device_mesh("cpu", (2, 2), ("replicate", "shard"))
        everyone = mesh.flatten(name="all")
        info = HSDPMeshInfo(mesh, 1, 0)
        model = made()
        experts = [layer.experts for layer in model.layers]
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
        fully_shard(
            model, mesh=everyone, shard_placement_fn=placement(experts, info), mp_policy=policy
        )
        rows = batch().chunk(4)[everyone.get_local_rank()]
        for index in range(2):
            model.set_requires_gradient_sync(index == 1)
            model(rows).square().mean().backward()
        norm = sum(full(each.grad).square().sum() for each in model.parameters()).sqrt()
        return [full(each.grad) for each in model.parameters()], norm

    wanted = made()
    for _ in range(2):
        wanted(batch()).square().mean().backward()
    for found, norm in sw.simulate(run, 4):
        for mine, each in zip(found, wanted.parameters(), strict=True):
            assert_close(mine, each.grad)
        assert_close(norm, torch.nn.utils.get_total_norm([p.grad for p in wanted.parameters()]))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda mesh: ShardPlacementResult(Shard(0), None), "mesh_info"),
        (lambda mesh: ShardPlacementResult(Shard(0), DDPMeshInfo(mesh, None, 0)), "FSDPMeshInfo"),
        (lambda mesh: ShardPlacementResult(Shard(2), FSDPMeshInfo(mesh, 0)), "weight"),
        (lambda mesh: ShardPlacementResult("first", FSDPMeshInfo(mesh, 0)), "weight"),
    ],
)
def test_wrong_results_are_refused(result, message):
    def run(mesh):
        layer = nn.Linear(4, 4)
        with pytest.raises(sw.ShardwiseError, match=message):
            fully_shard(layer, mesh=mesh, shard_placement_fn=lambda _: result(mesh))
        assert not isinstance(layer.weight, sw.DTensor)

    on_ranks(run)


def test_a_number_of_ranks_must_divide_every_mesh():
    def run():
        mesh = init_device_mesh("cpu", (2, 3), ("a", "b"))
        info = FSDPMeshInfo(mesh["b"], 0)
        with pytest.raises(FSDPError, match="reshard_after_forward"):
            fully_shard(
                nn.Linear(6, 6),
                mesh=mesh.flatten(name="all"),
                reshard_after_forward=2,
                shard_placement_fn=lambda _: ShardPlacementResult(None, info),
            )

    sw.simulate(run, 6)


def test_tied_parameters_of_two_groups():
    def run():
        mesh = init_device_mesh("cpu", (2, 2), ("replicate", "shard"))
        everyone, info = mesh.flatten(name="all"), HSDPMeshInfo(mesh, 1, 0)
        model = made()
        model.layers[1].experts = model.layers[0].experts
        for layer in model.layers:
            fully_shard(layer, mesh=everyone, shard_placement_fn=placement([layer.experts], info))
        fully_shard(model, mesh=everyone)
        assert model.layers[1].experts is model.layers[0].experts
        trained(model, batch().chunk(4)[everyone.get_local_rank()])
        return full(model.layers[0].experts)

    wanted = made()
    wanted.layers[1].experts = wanted.layers[0].experts
    trained(wanted, batch())
    for found in sw.simulate(run, 4):
        assert_close(found, wanted.layers[0].experts.detach())


# ---- parameters on a mesh that has the data-parallel axes too (`dp_mesh_dims`)


class Derived(nn.Module):
    """Uses parameters directly, and tensors that are computed from parameters only."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x):
        x = self.norm(torch.tanh(self.first(x)))
        return x @ self.weight.t() * (1 + self.scale)


def laid_out(mesh, dims, data_axes, options):
    torch.manual_seed(0)
    model = Derived().double()
    for name, each in list(model.named_parameters()):
        path, _, key = name.rpartition(".")
        others = [Shard(0) if name.startswith("first") else Replicate()] * (mesh.ndim - data_axes)
        whole = sw.distribute_tensor(each.detach(), mesh, [*[Replicate()] * data_axes, *others])
        setattr(model.get_submodule(path), key, nn.Parameter(whole))
    return fully_shard(model, mesh=mesh, dp_mesh_dims=dims, **options)


MESHES = {
    "fsdp": ((4,), ("dp",), DataParallelMeshDims(shard="dp")),
    "replicated": ((4,), ("dp",), DataParallelMeshDims(replicate="dp")),
    "hsdp": ((2, 2), ("rep", "dp"), DataParallelMeshDims(shard="dp", replicate="rep")),
    "two axes that shard": ((2, 2), ("a", "b"), DataParallelMeshDims(shard=("a", "b"))),
    "fsdp and tp": ((2, 2), ("dp", "tp"), DataParallelMeshDims(shard="dp")),
    "hsdp and tp": (
        (2, 2, 2),
        ("rep", "dp", "tp"),
        DataParallelMeshDims(shard="dp", replicate="rep"),
    ),
}


@pytest.mark.parametrize("case", MESHES)
@pytest.mark.parametrize("options", [{}, {"shard_placement_fn": lambda _: Shard(0)}])
def test_parameters_on_the_full_mesh(case, options):
    """Inputs are split over the data-parallel axes, and the loss is that of all ranks: gradients
    are sums of contributions."""
    shape, names, dims = MESHES[case]
    data_axes = len(shape) - ("tp" in names)

    def run():
        mesh = init_device_mesh("cpu", shape, names)
        model = laid_out(mesh, dims, data_axes, options)
        model.set_gradient_divide_factor(1.0)
        seen = []
        model.register_forward_hook(lambda *_: seen.append(model.first.weight.device_mesh))
        splits = [*[Shard(0)] * data_axes, *[Replicate()] * (mesh.ndim - data_axes)]
        x = sw.distribute_tensor(batch(), mesh, splits)
        trained(model, x)
        assert seen[0] is mesh
        return [full(each) for each in model.parameters()]

    torch.manual_seed(0)
    wanted = trained(Derived().double(), batch())
    for found in sw.simulate(run, torch.Size(shape).numel()):
        for mine, each in zip(found, wanted.parameters(), strict=True):
            assert_close(mine, each.detach())


def test_gradients_are_summed_by_fsdp_alone():
    """No operator sums the gradient of a parameter over the data-parallel axes."""

    def run():
        mesh = init_device_mesh("cpu", (2,), ("dp",))
        model = laid_out(mesh, DataParallelMeshDims(shard="dp"), 1, {})
        x = sw.distribute_tensor(batch(), mesh, [Shard(0)])
        events, _ = heard(mesh, lambda: model(x).square().mean().backward())
        backward = [each for each in events if each.cause.direction == "backward"]
        assert {each.cause.operator for each in backward} <= {"reduce_gradients", "unshard"}

    sw.simulate(run, 2)


def test_a_tensor_of_parameters_and_data_is_refused():
    """Its gradient would be a contribution for one and must be whole for the other."""

    def run():
        mesh = init_device_mesh("cpu", (2,), ("dp",))
        model = nn.Linear(6, 6).double()
        for name, each in list(model.named_parameters()):
            setattr(
                model, name, nn.Parameter(sw.distribute_tensor(each.detach(), mesh, [Replicate()]))
            )
        model.forward = lambda x: x * (model.bias * x.mean(0).redistribute(mesh, [Replicate()]))
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        x = sw.distribute_tensor(batch(), mesh, [Shard(0)]).requires_grad_()
        with pytest.raises(sw.DispatchError, match="dp_mesh_dims"):
            model(x)

    sw.simulate(run, 2)


def test_parameters_must_be_whole_on_the_data_parallel_axes():
    def run():
        mesh = init_device_mesh("cpu", (2, 1), ("dp", "tp"))
        model = nn.Linear(6, 6)
        model.weight = nn.Parameter(
            sw.distribute_tensor(model.weight.detach(), mesh, [Shard(0), Replicate()])
        )
        with pytest.raises(FSDPError, match=r"Replicate\(\) on 'dp'"):
            fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        with pytest.raises(FSDPError, match="nonexistent"):
            fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="nonexistent"))

    sw.simulate(run, 2)
