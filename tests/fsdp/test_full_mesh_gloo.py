"""`dp_mesh_dims` and `ShardPlacementResult` beside torch's FSDP2, on real ranks: the same
placements and the same gradients, whatever the inputs claim to be."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torchs_fsdp
from torch.distributed import tensor as torchs_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

import shardwise as sw
from shardwise import fsdp


class Ours:
    tensor, fsdp, make_mesh = sw, fsdp, staticmethod(sw.init_device_mesh)
    info, result = fsdp.FSDPMeshInfo, fsdp.ShardPlacementResult


class Torchs:
    tensor, fsdp, make_mesh = (
        torchs_tensor,
        torchs_fsdp,
        staticmethod(functools.cache(init_device_mesh)),
    )
    info, result = FSDPMeshInfo, ShardPlacementResult


MESHES = {
    "fsdp": ((4,), ("dp",), {"shard": "dp"}),
    "replicated": ((4,), ("dp",), {"replicate": "dp"}),
    "hsdp": ((2, 2), ("rep", "dp"), {"shard": "dp", "replicate": "rep"}),
    "two axes that shard": ((2, 2), ("a", "b"), {"shard": ("a", "b")}),
    "fsdp and tp": ((2, 2), ("dp", "tp"), {"shard": "dp"}),
    "replicated and tp": ((2, 2), ("dp", "tp"), {"replicate": "dp"}),
    "hsdp and tp": ((1, 2, 2), ("rep", "dp", "tp"), {"shard": "dp", "replicate": "rep"}),
}


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch():
    return torch.arange(64, dtype=torch.float64).reshape(8, 8) / 64


def described(model):
    axes = [
        [
            (getattr(placement, "dim", None), type(placement).__name__)
            for placement in each.placements
        ]
        for each in model.parameters()
    ]
    return axes, [each.grad.full_tensor() for each in model.parameters()]


def on_full_mesh(library, case, is_honest, factor):
    shape, names, dims = MESHES[case]
    mesh = library.make_mesh("cpu", shape, mesh_dim_names=names)  # torch's compares by identity
    tensor = library.tensor
    data_axes = len(shape) - ("tp" in names)
    split = {"0.weight": tensor.Shard(0), "0.bias": tensor.Shard(0), "2.weight": tensor.Shard(1)}
    model = made()
    for name, each in list(model.named_parameters()):
        path, _, key = name.rpartition(".")
        others = [split.get(name, tensor.Replicate())] * (len(shape) - data_axes)
        placements = [*[tensor.Replicate()] * data_axes, *others]
        laid_out = tensor.distribute_tensor(each.detach(), mesh, placements)
        setattr(model.get_submodule(path), key, nn.Parameter(laid_out))
    dp_mesh_dims = library.fsdp.DataParallelMeshDims(**dims)
    library.fsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=dp_mesh_dims)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    whole = [tensor.Replicate()] * len(shape)
    if is_honest:
        splits = [tensor.Shard(0)] * data_axes
        x = tensor.distribute_tensor(batch(), mesh, [*splits, *whole[data_axes:]])
    else:  # each rank has its own rows, and calls them replicated, as torch's own tests do
        rank, count = torch.distributed.get_rank(), 2 if "tp" in names else 4
        rows = batch().chunk(count)[rank * count // 4]
        x = tensor.DTensor.from_local(rows, mesh, whole, run_check=False)
    model(x).square().mean().backward()
    return described(model)


def both(function, *args):
    return function(Ours, *args), function(Torchs, *args)


def on_full_mesh_in_all_ways(library, case):
    ways = [(True, None), (True, 1.0), (False, None)]
    return [on_full_mesh(library, case, *each) for each in ways]


@pytest.mark.parametrize(
    "case",
    [
        case if case in ("hsdp", "fsdp and tp") else pytest.param(case, marks=pytest.mark.slow)
        for case in MESHES
    ],
)
def test_parameters_on_the_full_mesh(workers4, case):
    for ours, torchs in workers4.run(both, on_full_mesh_in_all_ways, case):
        for mine, theirs in zip(ours, torchs, strict=True):
            assert mine[0] == theirs[0]
            torch.testing.assert_close(mine[1], theirs[1])


def with_own_ranks(library):
    mesh = library.make_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    everyone = library.make_mesh("cpu", (4,), mesh_dim_names=("all",))
    tensor = library.tensor
    inner, outer = library.info(mesh["inner"], 0), library.info(everyone, 0)
    model = made()
    last = model[2].weight

    def place(parameter):
        if parameter is last:
            return library.result(placement=tensor.Shard(1), mesh_info=inner)
        return library.result(placement=tensor.Shard(0), mesh_info=outer)

    library.fsdp.fully_shard(model, mesh=everyone, shard_placement_fn=place)
    rank = torch.distributed.get_rank()
    for _ in range(2):
        model(batch().chunk(4)[rank]).square().mean().backward()
    return described(model)


def test_parameters_with_ranks_of_their_own(workers4):
    for mine, theirs in workers4.run(both, with_own_ranks):
        assert mine[0] == theirs[0]
        torch.testing.assert_close(mine[1], theirs[1])
