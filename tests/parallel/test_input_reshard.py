"""input_reshard: each rank keeps a part of a module's inputs for the backward."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import shardwise as sw
from shardwise import DTensor, Replicate, Shard
from shardwise.core.mesh import init_device_mesh
from shardwise.parallel import (
    ColwiseParallel,
    PlanError,
    RowwiseParallel,
    input_reshard,
    parallelize_module,
)


def on(count, run):
    return sw.simulate(lambda: run(init_device_mesh("cpu", (count,), ("tp",))), count)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def made(mesh=None, dim=None):
    torch.manual_seed(0)
    model = Mlp().double()
    if mesh is not None:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        assert input_reshard(parallelize_module(model, mesh, plan), mesh, dim) is model
    return model


def data(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gathers_in_backward(mesh, loss):
    events = []
    with sw.listen(events.append):
        loss.backward()
    return sum(each.rank == mesh.get_rank() and each.kind == "all_gather" for each in events)


@pytest.mark.parametrize("dim", [None, 0, 1, -1])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("whole", [False, True])
def test_gradients_are_those_of_one_process(dim, count, whole):
    plain, given = made(), data(3, 5, 4).requires_grad_()
    plain(given * 2).square().sum().backward()

    def run(mesh):
        model, mine = made(mesh, dim), data(3, 5, 4).requires_grad_()
        x = DTensor.from_local(mine, mesh, [Replicate()]) if whole else mine
        loss = model(x * 2).square().sum()
        # The projection keeps its input; what is split, and all results, are left alone.
        assert gathers_in_backward(mesh, loss) == (0 if dim is None else 1)
        torch.testing.assert_close(mine.grad, given.grad)
        for ours, one in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), one.grad)

    on(count, run)


@pytest.mark.parametrize("dim", [None, 0])
def test_an_input_is_freed_before_the_backward(dim):
    def run(mesh):
        model = made(mesh, dim)
        hidden = data(4, 4).requires_grad_() * 2
        memory = StorageWeakRef(hidden.untyped_storage())
        loss = model(hidden).sum()
        del hidden
        gc.collect()
        is_kept = not memory.expired()
        loss.backward()
        return is_kept

    assert on(2, run) == [dim is None] * 2


def test_inputs_that_are_split_are_left_alone():
    def run(mesh):
        norm = input_reshard(nn.LayerNorm(4).double(), mesh, 0)
        x = sw.distribute_tensor(data(6, 4), mesh, [Shard(0)]).requires_grad_()
        weight = data(4)
        plain = data(6, 4).requires_grad_()
        (F.layer_norm(plain, (4,)) * weight).sum().backward()
        loss = (norm(x) * weight).sum()
        assert gathers_in_backward(mesh, loss) == 0
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)

    on(2, run)


def test_a_forward_that_raises_leaves_nothing_behind_and_modules_can_be_copied():
    def run(mesh):
        model = made(mesh, 0)
        with pytest.raises(RuntimeError, match="reduction dim"):
            model(data(3, 5))
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            torch.ones(2, requires_grad=True).square().sum()
        assert len(kept) == 1 and isinstance(kept[0], torch.Tensor)
        copied = copy.deepcopy(model)
        assert gathers_in_backward(mesh, copied(data(3, 4)).sum()) == 1
        with pytest.raises(PlanError, match="input_reshard_dim: expected an int"):
            input_reshard(Mlp(), mesh, "0")

    on(2, run)
