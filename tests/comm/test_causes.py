"""Every collective that is heard says why it happened."""

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import Cause, Partial, Replicate, Shard
from shardwise.fsdp import fully_shard
from shardwise.parallel import Activations, shard_module


def heard(run):
    """The collectives of rank 0, of two: kind and cause."""
    events = []

    def with_mesh():
        run(sw.init_device_mesh("cpu", (2,), ("tp",)))

    with sw.listen(lambda event: event.rank == 0 and events.append(event)):
        sw.simulate(with_mesh, 2)
    return [(each.kind, each.cause) for each in events if each.cause != Cause()]


def test_an_operator_that_moves_its_inputs_is_the_cause():
    def run(mesh):
        pending = sw.ones(4, device_mesh=mesh, placements=[Partial()])
        pending.relu()

    assert heard(run) == [("all_reduce", Cause("relu"))]


def test_an_operator_that_communicates_within_is_the_cause():
    def run(mesh):
        sw.ones(4, device_mesh=mesh, placements=[Shard(0)]).softmax(0)

    assert {cause for _, cause in heard(run)} == {Cause("softmax")}


def test_the_backward_of_a_move_has_the_cause_of_the_move():
    def run(mesh):
        x = sw.ones(4, 6, device_mesh=mesh).requires_grad_()
        (x @ sw.ones(6, 8, device_mesh=mesh, placements=[Shard(1)])).sum().backward()

    assert heard(run) == [("all_reduce", Cause("matmul", direction="backward"))]


def test_a_redistribution_is_its_own_cause_whatever_runs_it():
    def run(mesh):
        x = sw.ones(4, device_mesh=mesh, placements=[Shard(0)])
        x.redistribute(placements=[Replicate()])
        x.redistribute(placements=[Replicate()], async_op=True).wait()
        x.full_tensor()

    assert heard(run) == 3 * [("all_gather", Cause("redistribute"))]


def test_a_collective_called_as_such_has_none():
    events = []

    def run():
        mesh = sw.init_device_mesh("cpu", (2,))
        sw.communicator(mesh).all_reduce(torch.ones(3))

    with sw.listen(events.append):
        sw.simulate(run, 2)
    assert {each.cause for each in events} == {Cause()}


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU())

    def forward(self, x):
        return self.inner(x).sum()


def test_the_module_is_named_by_its_path_also_for_what_leaves_it():
    def run(mesh):
        model = shard_module(
            Outer(),
            mesh,
            {
                "inner.0.weight": {"tp": Shard(1)},
                "inner.0": Activations(outputs={"tp": Shard(0)}),
            },
            src_data_rank=None,
        )
        model(torch.ones(1024, 4)).backward()

    assert heard(run) == [
        ("reduce_scatter", Cause("redistribute", "inner.0")),
        ("all_gather", Cause("redistribute", "inner.0", "backward")),
    ]


def test_a_module_that_raises_is_left():
    class Refuses(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    def run(mesh):
        with pytest.raises(ValueError, match="no"):
            nn.Sequential(Refuses())(None)
        sw.ones(4, device_mesh=mesh, placements=[Partial()]).relu()

    assert heard(run) == [("all_reduce", Cause("relu"))]


def test_modules_are_left_alone_when_nobody_listens():
    before = nn.Module.__call__
    with sw.listen(print):
        with sw.listen(print):
            pass
        assert nn.Module.__call__ is not before
    assert nn.Module.__call__ is before


def test_what_data_parallelism_sends_names_the_sharded_modules_it_is_for():
    def run(mesh):
        model = nn.Sequential(nn.Linear(700, 700), nn.Linear(700, 700), nn.Linear(700, 4))
        for layer in model[:2]:  # each too large to travel with another
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh)
        model(torch.ones(2, 700)).sum().backward()

    gathered = [cause for kind, cause in heard(run) if kind == "all_gather"]
    reduced = [cause for kind, cause in heard(run) if kind == "reduce_scatter"]
    forward = [Cause("unshard", name) for name in ("FSDPSequential, 0", "1")]
    assert gathered == [
        *forward,
        Cause("unshard", "1", "backward"),
        Cause("unshard", "0", "backward"),
    ]
    assert reduced == [
        Cause("reduce_gradients", name, "backward") for name in ("1", "FSDPSequential, 0")
    ]


def test_sums_along_replicas_are_for_gradients():
    def run():
        mesh = sw.init_device_mesh("cpu", (2, 1), ("replicate", "shard"))
        fully_shard(nn.Linear(4, 4), mesh=mesh)(torch.ones(2, 4)).sum().backward()

    events = []
    with sw.listen(lambda event: event.kind == "all_reduce" and events.append(event.cause)):
        sw.simulate(run, 2)
    assert events == 2 * [Cause("reduce_gradients", "FSDPLinear", "backward")]
