"""redistribute(async_op=True): a DTensor that waits for its data when it is first used."""

import copy
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from support.rules import full, heard, ranks, split, values
from torch import nn

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.fsdp import fully_shard
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module, shard_module
from shardwise.torch_internals import as_local

LAYOUTS = [[Shard(0)], [Shard(1)], [Replicate()], [Partial()]]


def is_waiting(tensor):
    return isinstance(tensor, DTensor) and type(tensor) is not DTensor


@pytest.mark.parametrize("source", LAYOUTS, ids=str)
@pytest.mark.parametrize("target", LAYOUTS, ids=str)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_values_and_gradients_are_those_of_a_synchronous_move(source, target, count):
    x, weight = values(4, 3), full(4, 3).double()

    def run(mesh):
        given = split(x, mesh, *source).requires_grad_()
        moved = given.redistribute(placements=target, async_op=True)
        assert moved.placements == tuple(target) and moved.shape == (4, 3)
        assert moved.requires_grad and not moved.is_leaf
        (moved * weight).sum().backward()
        torch.testing.assert_close(moved.full_tensor(), x)
        return given.grad.full_tensor()

    for gradient in ranks(run, count):
        assert torch.equal(gradient, weight)


def test_nested_axes_and_several_collectives():
    x = values(6, 5)

    def run(mesh):
        given = split(x, mesh, Partial(), Shard(0)).requires_grad_()
        moved = given.redistribute(placements=[Shard(1), Replicate()], async_op=True)
        moved.square().sum().backward()
        torch.testing.assert_close(given.grad.full_tensor(), 2 * x)

    ranks(run, 4, (2, 2))


USES = {
    "an operator": lambda y: y + 1,
    "an operator with a keyword": lambda y: torch.sum(input=y),
    "a list": lambda y: torch.cat([y, y]),
    "to_local": lambda y: y.to_local(),
    "full_tensor": lambda y: y.full_tensor(),
    "_local_tensor": lambda y: y._local_tensor,
    "redistribute": lambda y: y.redistribute(placements=[Shard(1)]),
    "item": lambda y: y.sum().item(),
    "tolist": lambda y: y.tolist(),
    "print": repr,
    "format": lambda y: f"{y}",
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
    "data": lambda y: y.data,
    "detach": lambda y: y.detach(),
    "a view": lambda y: y.view(-1),
    "an index": lambda y: y[0],
    "in place": lambda y: y.add_(1),
    "assignment": lambda y: y.__setitem__(0, 1.0),
    "a parameter": nn.Parameter,
    "stride": lambda y: y.stride(),
    "wait": lambda y: y.wait(),
    "iteration": list,
    "foreach": lambda y: torch._foreach_add([y], 1),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_waits_once(use):
    def run(mesh):
        x = split(full(4, 2), mesh, Shard(0))
        whole = x.redistribute(placements=[Replicate()])
        moved = x.redistribute(placements=[Replicate()], async_op=True)
        assert is_waiting(moved)
        memory = None
        use(moved)
        use(whole)
        assert type(moved) is DTensor
        memory = moved.to_local().data_ptr()
        use(moved)
        use(whole)
        assert moved.to_local().data_ptr() == memory
        assert torch.equal(moved.full_tensor(), whole.full_tensor())

    ranks(run)


def fully_sharded(model, mesh):
    return fully_shard(model, mesh=mesh["dp"])


def styled(model, mesh):
    return parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def both(model, mesh):
    return fully_sharded(styled(model, mesh), mesh)


def planned(model, mesh):
    return shard_module(model, mesh, {"0.weight": [Replicate(), Shard(0)]})


@pytest.mark.parametrize("prepare", [fully_sharded, styled, both, planned])
def test_modules_wait_for_their_inputs_and_results(prepare):
    def run():
        mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)).double()
        model = prepare(model, mesh)
        ranks_of_input = mesh if prepare is planned else mesh["tp"]
        given = split(values(4, 6), ranks_of_input, *[Shard(0)] * ranks_of_input.ndim)
        given = given.detach().requires_grad_()
        found = []
        for async_op in (False, True):
            whole = [Replicate()] * given.device_mesh.ndim
            x = given.redistribute(placements=whole, async_op=async_op)
            assert is_waiting(x) == async_op
            result = model(x)
            result.square().sum().backward()
            found.append((result.detach(), given.grad))
            given.grad = None
        for one, other in zip(*found, strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))

    sw.simulate(run, 4)


def test_shape_dtype_and_layout_do_not_wait():
    def run(mesh):
        x = split(full(4, 2), mesh, Shard(0))
        moved = x.redistribute(placements=[Replicate()], forward_dtype=torch.float64, async_op=True)
        facts = moved.shape, moved.dtype, moved.placements, moved.requires_grad, moved.device.type
        assert facts == ((4, 2), torch.float64, (Replicate(),), False, "cpu")
        assert moved.numel() == 8 and len(moved) == 4 and moved.dim() == 2 and is_waiting(moved)

    ranks(run)


def test_what_is_not_sent_is_an_ordinary_tensor_that_can_be_waited_for():
    def run(mesh):
        x = split(full(4, 2), mesh, Replicate())
        for target in (Shard(0), Replicate()):
            moved = x.redistribute(placements=[target], async_op=True)
            assert type(moved) is DTensor and moved.wait() is moved

    ranks(run)


def test_a_dropped_result_is_completed_and_freed():
    def run(mesh):
        x = split(full(6, 2), mesh, Shard(0), Partial())
        for _ in range(3):
            moved = x.redistribute(placements=[Replicate(), Replicate()], async_op=True)
            gone = weakref.ref(moved)
            del moved
            assert gone() is None
        return x.full_tensor()  # the ranks are still in step

    for got in ranks(run, 4, (2, 2)):
        assert torch.equal(got, full(6, 2))


def test_ranks_may_use_results_in_other_orders_or_not_at_all():
    def run(mesh):
        rank = mesh.get_rank()
        x = split(full(6, 2), mesh, Shard(0), Partial())
        layouts = [[Replicate(), Replicate()], [Shard(1), Shard(0)], [Replicate(), Shard(1)]]
        moved = [x.redistribute(placements=each, async_op=True) for each in layouts]
        for at in ((0, 1, 2), (2, 1, 0), (1,), ())[rank]:
            moved[at].to_local()
        if rank == 0:
            print(moved[0])
        return [each.full_tensor() for each in moved]

    for got in ranks(run, 4, (2, 2)):
        assert all(torch.equal(each, full(6, 2)) for each in got)


def test_all_collectives_have_started_when_it_returns():
    def run(mesh):
        x = split(full(6, 2), mesh, Shard(0), Partial())
        move = [Replicate(), Replicate()]
        asynchronous, moved = heard(mesh, lambda: x.redistribute(placements=move, async_op=True))
        synchronous, _ = heard(mesh, lambda: x.redistribute(placements=move))
        later, _ = heard(mesh, moved.wait)
        assert len(asynchronous) == len(synchronous) and not later

    ranks(run, 4, (2, 2))


def test_it_can_be_the_gradient_and_the_data_of_another_tensor():
    def run(mesh):
        x = split(full(4, 2), mesh, Shard(0))
        other = split(full(4, 2), mesh, Replicate()).requires_grad_()
        other.grad = x.redistribute(placements=[Replicate()], async_op=True)
        (other * 1).sum().backward()
        assert torch.equal(other.grad.full_tensor(), full(4, 2) + 1)
        other.data = (x * 2).redistribute(placements=[Replicate()], async_op=True)
        assert torch.equal(other.detach().full_tensor(), full(4, 2) * 2)

    ranks(run)


def test_without_gradients_and_in_inference_mode():
    def run(mesh):
        x = split(values(4, 2), mesh, Shard(0))
        with torch.no_grad():
            moved = x.redistribute(placements=[Shard(1)], async_op=True)
        assert not moved.requires_grad
        with torch.inference_mode():
            other = x.redistribute(placements=[Shard(1)], async_op=True)
            assert torch.equal(other.full_tensor(), x.full_tensor())
        y = x.requires_grad_().redistribute(placements=[Shard(1)], async_op=True)
        with torch.no_grad():
            y.wait()  # the history is that of the call
        assert y.requires_grad and torch.autograd.grad(y.sum(), x)[0].shape == (4, 2)

    ranks(run)


def test_a_custom_autograd_function_waits():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * ctx.saved_tensors[0] * gradient

    def run(mesh):
        x = split(values(4, 2), mesh, Shard(0)).requires_grad_()
        moved = x.redistribute(placements=[Replicate()], async_op=True)
        Double.apply(moved).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), 2 * x.full_tensor())

    ranks(run)


def on_real_ranks() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x = sw.distribute_tensor(full(8, 2), mesh, [Shard(0)])
    moved = x.redistribute(placements=[Replicate()], async_op=True)
    dist.all_reduce(moved)
    assert torch.equal(moved.full_tensor(), full(8, 2) * 4)
    sent = x.redistribute(placements=[Replicate()], async_op=True)
    got = [torch.empty(8, 2) for _ in range(4)]
    dist.all_gather(got, sent)
    assert all(torch.equal(each, full(8, 2)) for each in got)
    for _ in range(20):  # dropped while they are under way
        x.redistribute(placements=[Replicate()], async_op=True)
    rank = dist.get_rank()
    moved = [
        x.redistribute(placements=[target], async_op=True) for target in (Replicate(), Shard(1))
    ]
    for each in moved if rank % 2 else moved[::-1]:
        each.to_local()
    assert all(torch.equal(each.full_tensor(), full(8, 2)) for each in moved)


def test_results_under_way_are_right_on_real_ranks(workers4):
    workers4.run(on_real_ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_memory_that_is_read_without_waiting_is_nan(dtype):
    def run(mesh):
        moved = split(full(4, 2).to(dtype), mesh, Shard(0)).redistribute(
            placements=[Replicate()], async_op=True
        )
        with as_local():
            assert torch.isnan(moved).all()
        assert torch.equal(moved.full_tensor(), full(4, 2).to(dtype))

    ranks(run)
