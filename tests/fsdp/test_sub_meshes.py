"""fully_shard beside tensor and expert parallelism, on meshes that were cut in any way.

Gradients are compared with those of one process.
"""

import pytest
import torch
from support.refusals import refused
from support.sub_meshes import Meshes, loss_of, model_and_data, shard
from torch import nn

import shardwise as sw
from shardwise import DeviceMesh, DTensor, Shard, distribute_tensor, init_device_mesh
from shardwise.fsdp import fully_shard
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

CASES = {
    "experts beside fsdp": (1, 4, 1, 2),
    "experts on all ranks": (1, 4, 1, 4),
    "tensor parallel beside experts": (1, 2, 2, 2),
    "experts across the tensor-parallel axis": (1, 2, 2, 4),
    "replicas": (2, 2, 1, 2),
    "no data parallelism": (1, 1, 4, 4),
    "replicas and tensor parallel": (2, 1, 2, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_meshes_unflattened_from_the_world_go_together(case: str) -> None:
    reference, x = model_and_data()
    loss_of(reference, x).backward()
    expected = {name: each.grad for name, each in reference.named_parameters()}

    def run() -> None:
        meshes = Meshes.of(*CASES[case])
        model, whole = model_and_data()
        shard(model, meshes)
        count, index = meshes.loss.size(), meshes.loss.get_local_rank()
        loss_of(model, whole.chunk(count)[index]).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad.placements == parameter.placements
            torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], msg=name)

    sw.simulate(run, 4)


def test_gradients_on_different_meshes_are_clipped_by_their_common_norm() -> None:
    reference, x = model_and_data()
    loss_of(reference, x).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)

    def run() -> None:
        meshes = Meshes.of(1, 2, 2, 2)
        model, whole = model_and_data()
        shard(model, meshes)
        loss_of(model, whole.chunk(2)[meshes.loss.get_local_rank()]).backward()
        assert len({p.grad.device_mesh for p in model.parameters()}) == 2
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        total = total.full_tensor() if isinstance(total, DTensor) else total
        torch.testing.assert_close(total, norm)
        for (name, parameter), wanted in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted.grad, msg=name)

    sw.simulate(run, 4)


# ---- tensor parallelism on one part of a mesh, data parallelism on another


def train(tp: DeviceMesh, data: DeviceMesh, index: int, count: int) -> dict[str, torch.Tensor]:
    """Return the gradients of a model that is tensor-parallel on `tp` and sharded over `data`."""
    model, x = model_and_data()
    model.experts = nn.Identity()
    parallelize_module(model, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=data)
    loss_of(model, x.chunk(count)[index]).backward()
    joint = (*data.mesh_dim_names, *tp.mesh_dim_names)
    assert {each.device_mesh.mesh_dim_names for each in model.parameters()} == {joint}
    return {name: each.grad.full_tensor() for name, each in model.named_parameters()}


def check_trained(grads: dict[str, torch.Tensor]) -> None:
    model, x = model_and_data()
    model.experts = nn.Identity()
    loss_of(model, x).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, msg=name)


def test_a_later_cut_of_another_mesh_does_not_part_two_sub_meshes() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        tp, dp = mesh["tp"], mesh["dp"]
        other = init_device_mesh("cpu", (2, 1, 2), ("x", "y", "tp"))
        assert other["tp"] is tp  # equal cuts are one object
        check_trained(train(tp, dp, dp.get_local_rank(), 2))

    sw.simulate(run, 4)


def test_sub_meshes_of_two_equal_worlds_go_together() -> None:
    def run() -> None:
        dense = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        world = init_device_mesh("cpu", (4,), ("world",))
        data = world._unflatten("world", (2, 2), ("batch", "rest"))["batch"]
        check_trained(train(dense["tp"], data, data.get_local_rank(), 2))

    sw.simulate(run, 4)


@pytest.mark.parametrize("ranks", [[[0, 3], [1, 2]], [[2, 0], [3, 1]]])
def test_sub_meshes_of_ranks_in_any_order_go_together(ranks: list[list[int]]) -> None:
    def run() -> None:
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
        init_device_mesh("cpu", (2, 2), ("dp", "tp"))["tp"]
        check_trained(train(mesh["tp"], mesh["dp"], mesh.get_local_rank("dp"), 2))

    sw.simulate(run, 4)


def test_flattened_axes_of_one_mesh_go_with_the_others() -> None:
    def run() -> None:
        names = "pp", "dp_replicate", "dp_shard", "cp", "tp"
        world = init_device_mesh("cpu", (1, 1, 2, 1, 2), mesh_dim_names=names)
        world["dp_replicate", "dp_shard"]._flatten(mesh_dim_name="dp")
        world["dp_shard", "cp"]._flatten(mesh_dim_name="dp_shard_cp")
        world["dp_replicate", "dp_shard", "cp"]._flatten(mesh_dim_name="dp_cp")
        rank = world["dp_cp"].get_local_rank()
        assert world["dp"].size() == world["dp_cp"].size() == 2
        check_trained(train(world["tp"], world["dp_shard_cp"], rank, 2))
        hybrid = world["dp_replicate", "dp_shard_cp"]
        assert hybrid.shape == (1, 2)
        check_trained(train(world["tp"], hybrid, rank, 2))

    sw.simulate(run, 4)


def test_meshes_that_do_not_form_a_grid_are_refused_with_the_reason() -> None:
    def run() -> None:
        world = init_device_mesh("cpu", (4,), ("world",))
        one = world._unflatten(0, (2, 2), ("a", "b"))
        other = world._unflatten(0, (1, 4), ("c", "d"))
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), one["b"], [Shard(0)]))
        with refused("weight: it is a DTensor, and no mesh has both", "their ranks overlap"):
            fully_shard(model, mesh=other["d"])
        apart = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("x", "y"))
        with refused("weight: it is a DTensor, and no mesh has both", "expected parts of one mesh"):
            fully_shard(model, mesh=apart["x"])
        assert not isinstance(model.bias, DTensor)  # nothing was changed

    sw.simulate(run, 4)
