"""sw.accumulate(): gradients of micro-batches are summed on each rank, and over ranks only once."""

from contextlib import nullcontext

import pytest
import torch
from support.rules import heard
from torch import nn

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.core.mesh import init_device_mesh
from shardwise.fsdp import fully_shard
from shardwise.parallel import SequenceParallel, parallelize_module, shard_module

PARTS = 3


class Net(nn.Module):
    """Layers, a norm and a tie, of sizes that two ranks cannot share equally."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 5), nn.LayerNorm(5)
        self.second, self.again = nn.Linear(5, 5, bias=False), nn.Linear(5, 5)
        self.again.weight = self.second.weight

    def forward(self, x):
        return self.again(torch.tanh(self.second(self.norm(self.first(x)))))


def made():
    torch.manual_seed(0)
    return Net().double()


def parts(rows=5):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(PARTS, rows, 6, generator=generator, dtype=torch.float64)
    return list(x)


def backward(model, x):
    (model(x).square().mean() / PARTS).backward()


def in_one_process():
    model = made()
    for x in parts():
        backward(model, x)
    return model


def assert_same(model, wanted):
    for (name, mine), theirs in zip(model.named_parameters(), wanted.parameters(), strict=True):
        found = mine.grad.full_tensor()
        torch.testing.assert_close(
            found, theirs.grad, msg=lambda text, name=name: f"{name}: {text}"
        )


LAYOUTS = {
    "replicated": {},
    "split over dp": {"*.*": {"dp": Shard(0)}},
    "split over tp": {"first.*": {"tp": Shard(0)}, "second.*": {"tp": Shard(1)}},
    "some of both": {"first.*": {"dp": Shard(0), "tp": Shard(0)}},
}


def planned(mesh, layout):
    return shard_module(made(), mesh, LAYOUTS[layout])


def split(x, mesh):
    return sw.distribute_tensor(x, mesh, [Shard(0), *[Replicate()] * (mesh.ndim - 1)])


def on_ranks(run, shape=(2,)):
    names = ("dp", "tp")[: len(shape)]
    size = torch.Size(shape).numel()
    return sw.simulate(lambda: run(init_device_mesh("cpu", shape, names)), size)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        *(((2, 2), layout) for layout in LAYOUTS),
        ((3,), "replicated"),
        ((3,), "split over dp"),
    ],
)
def test_gradients_are_those_of_one_process(layout, shape):
    def run(mesh):
        model = planned(mesh, layout)
        with sw.accumulate():
            for x in parts():
                backward(model, split(x, mesh))
        assert_same(model, in_one_process())

    on_ranks(run, shape)


def backward_events(mesh, call):
    events, _ = heard(mesh, call)
    return [(each.kind, each.shape) for each in events if each.cause.direction == "backward"]


def test_the_reductions_of_k_micro_batches_are_those_of_one():
    def run(mesh):
        def step(count):
            model = planned(mesh, "replicated")
            with sw.accumulate():
                for x in parts()[:count]:
                    backward(model, split(x, mesh))

        one = backward_events(mesh, lambda: step(1))
        assert len(one) == 6
        assert backward_events(mesh, lambda: step(PARTS)) == one

    on_ranks(run)


def test_a_parameter_that_is_gathered_for_use_is_reduced_once():
    def run(mesh):
        weight = split(torch.arange(4.0), mesh).requires_grad_()
        x = split(torch.arange(32.0).reshape(8, 4), mesh)

        def step():
            with sw.accumulate():
                for _ in range(PARTS):
                    (x * weight).sum().backward()

        assert len(backward_events(mesh, step)) == 1
        assert weight.grad.placements == (Shard(0),)
        wanted = PARTS * torch.arange(32.0).reshape(8, 4).sum(0)
        torch.testing.assert_close(weight.grad.full_tensor(), wanted)

    on_ranks(run)


def test_without_it_each_micro_batch_reduces():
    def run(mesh):
        model = planned(mesh, "replicated")
        events, _ = heard(mesh, lambda: [backward(model, split(x, mesh)) for x in parts()])
        count = sum(each.cause.direction == "backward" for each in events)
        again, _ = heard(mesh, lambda: backward(model, split(parts()[0], mesh)))
        assert count == PARTS * sum(each.cause.direction == "backward" for each in again)

    on_ranks(run)


def test_reading_a_gradient_completes_it():
    """Optimizers, clipping and users see sums over all ranks, within the context too."""

    def run(mesh):
        model, wanted = planned(mesh, "replicated"), made()
        first, second, third = parts()
        with sw.accumulate():
            backward(model, split(first, mesh))
            backward(wanted, first)
            assert_same(model, wanted)
            backward(model, split(second, mesh))
            backward(wanted, second)
            ours = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            theirs = torch.nn.utils.clip_grad_norm_(wanted.parameters(), 0.01)
            torch.testing.assert_close(sw.DTensor.full_tensor(ours), theirs)
            for each in (model, wanted):
                torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9).step()
            backward(model, split(third, mesh))
            backward(wanted, third)
        assert_same(model, wanted)
        for mine, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs)

    on_ranks(run)


def test_a_gradient_that_is_replaced_is_forgotten():
    def run(mesh):
        model, wanted = planned(mesh, "replicated"), made()
        with sw.accumulate():
            backward(model, split(parts()[0], mesh))
            for each in model.parameters():
                each.grad = None
            backward(model, split(parts()[1], mesh))
        backward(wanted, parts()[1])
        assert_same(model, wanted)

    on_ranks(run)


def test_gradients_of_before_stay():
    def run(mesh):
        model, wanted = planned(mesh, "replicated"), in_one_process()
        backward(model, split(parts()[0], mesh))
        with sw.accumulate():
            for x in parts()[1:]:
                backward(model, split(x, mesh))
        assert_same(model, wanted)

    on_ranks(run)


def test_an_exception_drops_what_was_put_off_and_communicates_nothing():
    def run(mesh):
        model = planned(mesh, "replicated")
        backward(model, split(parts()[0], mesh))
        before = [each.grad.full_tensor() for each in model.parameters()]

        def fail():
            with sw.accumulate():
                backward(model, split(parts()[1], mesh))
                raise ZeroDivisionError

        def caught():
            with pytest.raises(ZeroDivisionError):
                fail()

        assert not backward_events(mesh, caught)
        for each, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(each.grad.full_tensor(), old)
        model.zero_grad()
        wanted = made()
        backward(model, split(parts()[0], mesh))  # reduced at once, as ever
        backward(wanted, parts()[0])
        assert_same(model, wanted)

    on_ranks(run)


def test_nested_contexts_are_one():
    def run(mesh):
        model = planned(mesh, "replicated")

        def step():
            with sw.accumulate():
                for x in parts():
                    with sw.accumulate():
                        backward(model, split(x, mesh))

        events, _ = heard(mesh, step)
        names = [each for each in events if each.cause.direction == "backward"]
        assert len(names) == len(list(model.parameters()))
        assert_same(model, in_one_process())

    on_ranks(run)


def test_grad_and_hooks_get_complete_gradients():
    def run(mesh):
        model, wanted = planned(mesh, "replicated"), made()
        x = parts()[0]
        seen = []
        model.first.weight.register_hook(lambda gradient: seen.append(gradient.full_tensor()))
        model.norm.weight.register_post_accumulate_grad_hook(
            lambda each: seen.append(each.grad.full_tensor())
        )
        with sw.accumulate():
            found = torch.autograd.grad(
                model(split(x, mesh)).square().mean(), list(model.parameters())
            )
            expected = torch.autograd.grad(wanted(x).square().mean(), list(wanted.parameters()))
            for mine, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(mine.full_tensor(), theirs)
            seen.clear()
            backward(model, split(x, mesh))
            backward(wanted, x)
            torch.testing.assert_close(seen[0], wanted.norm.weight.grad)
            torch.testing.assert_close(seen[1], wanted.first.weight.grad)

            def energy(module, x):
                loss = module(x).square().mean()
                (slope,) = torch.autograd.grad(loss, module.first.weight, create_graph=True)
                return loss + slope.square().sum()

            energy(model, split(x, mesh)).backward()
            energy(wanted, x).backward()
        assert_same(model, wanted)

    on_ranks(run)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_have_the_gradients_of_one_process(use_reentrant):
    def run(mesh):
        model = planned(mesh, "replicated")
        with sw.accumulate():
            for x in parts():
                x = split(x, mesh).requires_grad_()
                hidden = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=use_reentrant)
                (hidden.square().mean() / PARTS).backward()
        assert_same(model, in_one_process())

    on_ranks(run)


def test_a_forward_of_before_reduces_at_once():
    def run(mesh):
        model, wanted = planned(mesh, "replicated"), made()
        loss = model(split(parts()[0], mesh)).square().mean()
        with sw.accumulate():
            loss.backward()
            wanted(parts()[0]).square().mean().backward()
            events, _ = heard(mesh, lambda: assert_same(model, wanted))
            assert not [each for each in events if each.cause.operator == "accumulate"]

    on_ranks(run)


def test_norms_of_sequence_parallelism_are_reduced_once():
    def run(mesh):
        model, wanted = nn.Sequential(nn.LayerNorm(6).double()), nn.LayerNorm(6).double()
        parallelize_module(model, mesh, {"0": SequenceParallel()})

        def step():
            with sw.accumulate():
                for x in parts():
                    whole = sw.distribute_tensor(x.unsqueeze(0), mesh, [Shard(1)])
                    backward(model, whole)

        assert len(backward_events(mesh, step)) == 2
        for x in parts():
            backward(wanted, x)
        assert_same(model, wanted)

    on_ranks(run)


def test_pending_leaves_and_low_precision():
    def run(mesh):
        weight = sw.distribute_tensor(torch.ones(3, dtype=torch.bfloat16), mesh, [Replicate()])
        weight.requires_grad_()
        x = split(torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), mesh)
        with sw.accumulate():
            for _ in range(2):
                (x * weight).sum().backward()
        assert weight.grad.dtype is torch.bfloat16 and weight.grad.placements == (Replicate(),)
        assert weight.grad.full_tensor().tolist() == [6.0, 10.0, 14.0]
        pending = sw.DTensor.from_local(torch.ones(3), mesh, [Partial()]).requires_grad_()
        with sw.accumulate():
            (pending * split(torch.ones(2, 3), mesh)).sum().backward()
        assert pending.grad.full_tensor().tolist() == [2.0] * 3

    on_ranks(run)


def test_ranks_that_differ_are_told():
    def run(mesh):
        model = planned(mesh, "replicated")
        with sw.accumulate() if mesh.get_rank() else nullcontext():
            for x in parts():
                backward(model, split(x, mesh))

    with pytest.raises(sw.ShardwiseError, match="all_reduce"):
        on_ranks(run)


def split_rows_and_weight():
    mesh = init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(torch.arange(8.0).view(2, 4), mesh, [Shard(0)])
    return x, sw.distribute_tensor(torch.ones(4), mesh, [Replicate()]).requires_grad_()


def test_a_parameter_that_is_frozen_before_the_end_has_its_gradient():
    def run():
        x, weight = split_rows_and_weight()
        with sw.accumulate():
            (x * weight).sum().backward()
            weight.requires_grad_(False)
        assert not weight.requires_grad
        return weight.grad.full_tensor().tolist()

    assert sw.simulate(run, 2) == [[4.0, 6.0, 8.0, 10.0]] * 2


def test_a_gradient_that_is_read_in_inference_mode_can_be_added_to():
    def run():
        x, weight = split_rows_and_weight()
        with sw.accumulate():
            (x * weight).sum().backward()
            with torch.inference_mode():
                assert weight.grad.full_tensor().tolist() == [4.0, 6.0, 8.0, 10.0]
            (x * weight).sum().backward()
        return weight.grad.full_tensor().tolist()

    assert sw.simulate(run, 2) == [[8.0, 12.0, 16.0, 20.0]] * 2


def test_a_gradient_of_fsdp_that_is_replaced_is_forgotten():
    def run():
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        model, wanted = nn.Linear(4, 3), nn.Linear(4, 3)
        wanted.load_state_dict(model.state_dict())
        fully_shard(model, mesh=mesh)
        x = torch.randn(4, 4)
        mine = x.chunk(2)[mesh.get_local_rank()]
        with sw.accumulate():
            model(mine).square().mean().backward()
            with torch.inference_mode():
                assert model.bias.grad.full_tensor().shape == (3,)
            model(mine).square().mean().backward()
            for each in model.parameters():
                each.grad = None
            model(mine).square().mean().backward()
        wanted(x).square().mean().backward()
        assert_same(model, wanted)

    sw.simulate(run, 2)
