"""A rank outside of a mesh has DTensors without data: nothing raises, waits or communicates there.

The tests run on four ranks, with a mesh of the first two (and of others).
"""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.rules import full
from torch import nn

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard


def inside(mesh):
    return mesh.get_coordinate() is not None


def part():
    return sw.DeviceMesh("cpu", [0, 1])


def on_ranks(run):
    """Run `run(mesh)` on four simulated ranks, of which two are in the mesh."""
    return sw.simulate(lambda: run(part()), 4)


PLACEMENTS = [[Shard(0)], [Shard(1)], [Replicate()], [Partial()]]


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_every_way_to_make_one(placements):
    def run(mesh):
        whole = full(5, 4).requires_grad_()
        local = sw.Layout.from_placements(mesh, (5, 4), placements).local_shape((0,))
        made = {
            "distribute_tensor": sw.distribute_tensor(whole, mesh, placements),
            "own": sw.distribute_tensor(whole, mesh, placements, src_data_rank=None),
            "from_local": DTensor.from_local(
                torch.ones(sizes(mesh) if inside(mesh) else (5, 4), requires_grad=True),
                mesh,
                placements,
                shape=(5, 4),
            ),
            "zeros": sw.zeros(5, 4, device_mesh=mesh, placements=placements, requires_grad=True),
            "randn": sw.randn(5, 4, device_mesh=mesh, placements=placements),
            "full": sw.full((5, 4), 2.0, device_mesh=mesh, placements=placements),
            "arange": sw.arange(20, device_mesh=mesh, placements=[Replicate()]).reshape(5, 4),
            "eye": sw.eye(5, 4, device_mesh=mesh, placements=placements),
        }
        facts = {}
        for name, tensor in made.items():
            if not inside(mesh):
                assert tensor.to_local().shape == tensor._local_tensor.shape == (0,)
                assert tensor.full_tensor().shape == (0,)
            elif name == "zeros":
                assert mesh.get_rank() or tensor.to_local().shape == local
            facts[name] = tensor.shape, tensor.placements, tensor.dtype, tensor.requires_grad
            facts[name] += (name == "from_local" or tensor.is_leaf, tensor.stride(), tensor.device)
        return facts

    def sizes(mesh):
        return sw.Layout.from_placements(mesh, (5, 4), placements).local_shape()

    first, *others = on_ranks(run)
    for other in others:
        assert other == first


OPERATORS = {
    "add": lambda x: x + 1,
    "compare": lambda x: x > 3,
    "sum": lambda x: x.sum(),
    "sum of integers": lambda x: x.long().sum(0),
    "mean": lambda x: x.mean(dim=1, keepdim=True),
    "matmul": lambda x: x @ x.T,
    "plain operand": lambda x: x * torch.ones(4),
    "softmax": lambda x: x.softmax(0),
    "view": lambda x: x.reshape(-1),
    "index": lambda x: x[1:3, 0],
    "index by a tensor": lambda x: x[torch.tensor([1, 2])],
    "cat": lambda x: torch.cat([x, x]),
    "split": lambda x: x.split(2),
    "topk": lambda x: torch.topk(x, 2),
    "sort": lambda x: x.sort(0),
    "zeros_like": torch.zeros_like,
    "new_ones": lambda x: x.new_ones(5, 4),
    "rand_like": torch.rand_like,
    "dropout": F.dropout,
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "in place": lambda x: x.clone().add_(1),
    "assignment": lambda x: x.clone().__setitem__(0, 1.0),
    "out": lambda x: torch.add(x, 1, out=torch.empty_like(x)),
    "detach": lambda x: x.detach(),
    "redistribute": lambda x: x.redistribute(placements=[Shard(1)]),
    "asynchronous": lambda x: x.redistribute(placements=[Shard(1)], async_op=True),
    "cast": lambda x: x.to(torch.bfloat16),
    "data": lambda x: x.data,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_operators_give_the_shapes_dtypes_and_layouts_of_the_ranks_of_the_mesh(placements):
    def described(value):
        if isinstance(value, torch.Tensor):
            assert isinstance(value, DTensor)
            return tuple(value.shape), value.dtype, value.placements
        return [described(each) for each in value] if isinstance(value, tuple) else value

    def run(mesh):
        torch.manual_seed(0)
        x = sw.distribute_tensor(full(5, 4), mesh, placements)
        facts = {name: described(call(x)) for name, call in OPERATORS.items()}
        return facts, torch.rand(1)  # the generators are in step

    first, *others = on_ranks(run)
    for other in others:
        assert other == first


def test_values_are_zeros():
    def run(mesh):
        x = sw.distribute_tensor(full(5, 4), mesh, [Shard(0)])
        total = x.sum()
        found = total.item(), float(total), bool(total), int(total), f"{total:.1f}"
        assert found == (
            (210.0, 210.0, True, 210, "210.0") if inside(mesh) else (0, 0, 0, 0, "0.0")
        )
        assert torch.equal(x, x) and torch.allclose(x, x)
        assert inside(mesh) or (x.tolist() == [] and x.numpy().size == 0)
        assert repr(x).startswith("DTensor(f32[5@0, 4]")

    on_ranks(run)


def test_gradients_are_tensors_without_data():
    def run(mesh):
        x = sw.distribute_tensor(full(5, 4), mesh, [Shard(0)]).requires_grad_()
        y = (x * x).sum()
        assert y.requires_grad and not y.is_leaf and x.is_leaf
        y.backward()
        assert x.grad.shape == (5, 4) and x.grad.placements == (Shard(0),)
        (again,) = torch.autograd.grad((x * 3).sum(), x)
        if inside(mesh):
            assert torch.equal(x.grad.full_tensor(), 2 * full(5, 4))
        else:
            assert x.grad.to_local().shape == again.to_local().shape == (0,)
        z = sw.distribute_tensor(full(5, 4), mesh, [Shard(0)])
        z.mul_(x)
        assert z.requires_grad
        local = torch.ones(2, 4, requires_grad=True)
        shape = (5, 4) if not inside(mesh) else None
        if shape:
            DTensor.from_local(local, mesh, [Shard(0)], shape=shape).sum().backward()
            assert torch.equal(local.grad, torch.zeros(2, 4))

    on_ranks(run)


def trained(mesh):
    """Train a model on a mesh; return its losses and the parameters of the ranks of the mesh."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
    sw.distribute_module(model, mesh)
    x = sw.distribute_tensor(full(6, 4) / 24, mesh, [Shard(0)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = F.mse_loss(model(x), torch.zeros(6, 2))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, torch.rand(1).item()


def test_a_model_trains_on_the_ranks_of_the_mesh():
    (losses, drawn), second, *outside = on_ranks(trained)
    assert second == (losses, drawn) and losses[-1] < losses[0]
    assert all(each == ([0.0] * 3, drawn) for each in outside)


def test_a_tensor_moves_to_ranks_outside_of_its_mesh():
    def run(mesh):
        other = sw.DeviceMesh("cpu", [2, 3])
        x = sw.distribute_tensor(full(5, 4), mesh, [Shard(0)])
        moved = x.redistribute(other, [Shard(1)])
        assert moved.shape == (5, 4) and moved.placements == (Shard(1),)
        if inside(other):
            assert torch.equal(moved.full_tensor(), full(5, 4))
        else:
            assert moved.to_local().shape == (0,) and (moved + 1).placements == (Shard(1),)

    on_ranks(run)


def test_what_needs_data_is_refused_outside():
    def run(mesh):
        x = sw.distribute_tensor(full(5, 4), mesh, [Replicate()])
        if inside(mesh):
            return
        with pytest.raises(sw.DispatchError, match="depends on the values"):
            x.nonzero()
        with pytest.raises(sw.DispatchError, match="depends on the values"):
            torch.masked_select(x, x > 3)

    on_ranks(run)


def on_real_ranks():
    torch.manual_seed(0)
    mesh = part()
    assert sw.rand(8, device_mesh=mesh, placements=[Shard(0)]).shape == (8,)
    x = sw.distribute_tensor(full(5, 4), mesh, [Shard(0)]).requires_grad_()
    (x @ x.T).sum().backward()
    found = [x.grad.full_tensor().shape, x.sum().item()]
    if not inside(mesh):
        with pytest.raises(sw.DispatchError, match="this rank is not in"):
            dist.all_reduce(x.detach())
    y = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
    assert y.shape == (4, 4) and (y + 1).full_tensor().shape == ((4, 4) if inside(mesh) else (0,))
    everybody = sw.init_device_mesh("cpu", (4,))  # and all ranks are still in step
    sw.check_random_state(everybody)
    moved = x.detach().redistribute(everybody, [Shard(0)])
    assert torch.equal(moved.full_tensor(), full(5, 4))
    assert sw.randn(8, device_mesh=everybody, placements=[Shard(0)]).full_tensor().shape == (8,)
    return found


@pytest.mark.slow  # it imports a large part of torch
def test_real_ranks_outside_of_the_mesh_have_no_data(workers4):
    first, second, *others = workers4.run(on_real_ranks)
    assert first == second and first[1] == 210
    assert all(each == [torch.Size([0]), 0.0] for each in others)


def test_in_place_operators_give_gradients_to_all_inputs():
    def run(mesh):
        x, weight = (
            sw.distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_() for _ in "xw"
        )
        (x * 1).add_(weight).sum().backward()
        return None not in (x.grad, weight.grad)

    assert on_ranks(run) == [True] * 4
