"""FSDPModule: every setter does what it says, counted in collectives."""

import pytest
import torch
from support.fsdp_cases import (
    WIDTH,
    apart,
    assert_at_rest,
    assert_close,
    assert_same,
    batch,
    full,
    kinds,
    made,
    mean_square,
    mine,
    on_ranks,
    shard_all,
    sharded,
    train,
)
from support.rules import heard
from torch import nn

import shardwise as sw
from shardwise.core.mesh import init_device_mesh
from shardwise.fsdp import AllGather, ReduceScatter


def counted(mesh, model, backward=True):
    """How many gathers forward and backward take, and how many reductions."""
    forward, loss = heard(mesh, lambda: mean_square(model, mine(batch(), mesh)))
    found = [event.kind for event in forward]
    assert set(found) <= {"all_gather"}
    after = kinds(mesh, loss.backward) if backward else []
    return len(found), after.count("all_gather"), after.count("reduce_scatter")


# ---- gathering


def test_groups_are_gathered_again_in_backward_but_for_the_outermost_and_the_last():
    def run(mesh):
        assert counted(mesh, sharded(mesh, reshard_after_forward=None)) == (4, 2, 4)
        assert counted(mesh, sharded(mesh, reshard_after_forward=True)) == (4, 4, 4)
        assert counted(mesh, sharded(mesh, reshard_after_forward=False)) == (4, 0, 4)

    on_ranks(run)


def test_small_groups_travel_together():
    def run(mesh):
        model = shard_all(made(), mesh)
        assert counted(mesh, model)[::2] == (1, 1)

    on_ranks(run)


def test_set_reshard_after_forward():
    def run(mesh):
        model = sharded(mesh)
        model.set_reshard_after_forward(False)
        assert counted(mesh, model) == (4, 0, 4)
        model.set_reshard_after_forward(True)
        assert counted(mesh, model) == (4, 4, 4)
        model.set_reshard_after_forward(False, recurse=False)
        model.layers[0].set_reshard_after_forward(False)
        assert counted(mesh, model) == (4, 2, 4)
        assert_at_rest(model)

    on_ranks(run)


def test_set_reshard_after_backward_keeps_what_has_not_changed():
    def run(mesh):
        model = sharded(mesh)
        model.set_reshard_after_backward(False)
        assert counted(mesh, model) == (4, 4, 4)
        assert counted(mesh, model) == (0, 4, 4)  # nothing was resharded after the last backward
        model.zero_grad()
        mean_square(model, mine(batch(), mesh)).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert counted(mesh, model)[0] == 4
        plain = made()
        mean_square(plain, batch()).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        assert_close(model(batch()), plain(batch()))
        model.set_reshard_after_backward(True)
        mean_square(model, mine(batch(), mesh)).backward()
        assert_at_rest(model)

    on_ranks(run)


def test_set_unshard_in_backward():
    class Embeds(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 3)])

        def forward(self, tokens):
            return self.layers[1](self.layers[0](tokens))

    tokens = torch.tensor([[0, 1], [2, 2], [6, 3], [4, 5]])

    def loss(model, x):
        return model(x).square().mean()

    plain = train(made(Embeds), tokens, loss=loss)

    def run(mesh):
        model = apart(shard_all(made(Embeds), mesh))
        x = mine(tokens, mesh)
        assert kinds(mesh, loss(model, x).backward).count("all_gather") == 2
        model.zero_grad()
        model.layers[0].set_unshard_in_backward(False)
        assert kinds(mesh, loss(model, x).backward).count("all_gather") == 1
        train(model, x, loss=loss)
        assert_same(model, plain)
        assert_at_rest(model)

    on_ranks(run)


def test_prefetch_lists_say_what_is_gathered_while_a_module_computes():
    """Seen by the state of the modules when a layer computes."""

    def run(mesh):
        model = sharded(mesh)
        seen = {}

        def look(at, where):
            def hook(*_):
                units = [layer._fsdp_group.units[0] for layer in model.layers]
                seen[where, at] = [unit.gather is not None for unit in units]

            return hook

        for at, layer in enumerate(model.layers):
            layer.linear.register_forward_pre_hook(look(at, "forward"))
            layer.linear.register_full_backward_pre_hook(look(at, "backward"))
        mean_square(model, mine(batch(), mesh)).backward()
        assert seen["forward", 0] == [False, True, False]  # by default the next one
        assert seen["forward", 1] == [False, False, True]
        assert seen["backward", 2] == [False, True, False]
        assert seen["backward", 1] == [True, False, False]
        first, second, third = model.layers
        first.set_modules_to_forward_prefetch([second, third])
        second.set_modules_to_forward_prefetch([])
        third.set_modules_to_backward_prefetch([second, first])
        second.set_modules_to_backward_prefetch([])
        mean_square(model, mine(batch(), mesh)).backward()
        assert seen["forward", 0] == [False, True, True]
        assert seen["forward", 1] == [False, False, True]
        assert seen["backward", 2] == [True, True, False]
        assert_at_rest(model)

    on_ranks(run)


# ---- gradients


def test_set_requires_gradient_sync_accumulates_without_communication():
    plain = made()
    for scale in (1, 2, 3):
        mean_square(plain, scale * batch()).backward()

    def run(mesh):
        model = sharded(mesh)
        x = mine(batch(), mesh)
        model.set_requires_gradient_sync(False)
        for scale in (1, 2):
            loss = mean_square(model, scale * x)
            assert "reduce_scatter" not in kinds(mesh, loss.backward)
            assert all(each.grad is None for each in model.parameters())
            assert_at_rest(model)
        model.set_requires_gradient_sync(True)
        assert kinds(mesh, mean_square(model, 3 * x).backward).count("reduce_scatter") == 4
        assert_same(model, plain)

    on_ranks(run)


def test_set_requires_gradient_sync_of_one_group():
    def run(mesh):
        model = sharded(mesh)
        model.set_requires_gradient_sync(False, recurse=False)
        assert counted(mesh, model)[2] == 3
        assert model.head.weight.grad is None
        assert model.layers[0].linear.weight.grad is not None

    on_ranks(run)


def test_set_requires_all_reduce_accumulates_shards_of_one_replica():
    plain = made()
    for scale in (1, 2):
        mean_square(plain, scale * batch()).backward()

    def run():
        mesh = init_device_mesh("cpu", (2, 2), ("replicate", "shard"))
        model = apart(shard_all(made(), mesh))
        x = batch().chunk(4)[mesh.get_rank()]
        model.set_requires_all_reduce(False)
        found = kinds(mesh, mean_square(model, x).backward)
        assert found.count("reduce_scatter") == 4 and "all_reduce" not in found
        assert all(each.grad is None for each in model.parameters())
        model.set_requires_all_reduce(True)
        found = kinds(mesh, mean_square(model, 2 * x).backward)
        assert found.count("reduce_scatter") == 4 and found.count("all_reduce") == 4
        assert_same(model, plain)

    sw.simulate(run, 4)


def test_set_is_last_backward_lets_reductions_go_on():
    plain = made()
    for scale in (1, 2):
        mean_square(plain, scale * batch()).backward()

    def run(mesh):
        model = shard_all(made(), mesh)
        x = mine(batch(), mesh)
        model.set_is_last_backward(False)
        mean_square(model, x).backward()
        assert all(each.grad is None for each in model.parameters())  # on their way
        model.set_is_last_backward(True)
        mean_square(model, 2 * x).backward()
        assert_same(model, plain)
        assert_at_rest(model)

    on_ranks(run)


def test_set_gradient_divide_factor_is_of_one_group():
    plain = made()
    mean_square(plain, batch()).backward()

    def run(mesh):
        model = sharded(mesh)
        model.layers[0].set_gradient_divide_factor(8)
        model.set_force_sum_reduction_for_comms(True)
        mean_square(model, mine(batch(), mesh)).backward()
        first, second = model.layers[0].linear.weight.grad, model.layers[1].linear.weight.grad
        assert_close(full(first), plain.layers[0].linear.weight.grad / 4)
        assert_close(full(second), plain.layers[1].linear.weight.grad)

    on_ranks(run)


def test_set_all_reduce_hook_sees_reduced_gradients_and_may_change_them():
    plain = made()
    mean_square(plain, batch()).backward()

    def run(mesh):
        model = shard_all(made(), mesh)
        seen = []

        def hook(gradients):
            seen.append(gradients.square().sum())
            gradients.mul_(10)

        model.layers[1].set_all_reduce_hook(hook)
        mean_square(model, mine(batch(), mesh)).backward()
        squares = sw.communicator(mesh).all_reduce(seen[0])
        wanted = sum(each.grad.square().sum() for each in plain.layers[1].parameters())
        assert_close(squares, wanted)
        assert len(seen) == 1
        for at, scale in ((0, 1), (1, 10), (2, 1)):
            for name, parameter in model.layers[at].named_parameters():
                wanted = plain.layers[at].get_parameter(name).grad * scale
                assert_close(full(parameter.grad), wanted, name)

    on_ranks(run)


def test_hooks_on_parameters_are_called_once_they_have_their_gradients():
    """So an optimizer may run in backward."""

    def fused(model, x):
        optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}

        def step(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            mean_square(model, x).backward()
        return model

    plain = fused(made(), batch())

    def run(mesh):
        assert_same(fused(shard_all(made(), mesh), mine(batch(), mesh)), plain)

    on_ranks(run)


@pytest.mark.parametrize("early", [True, False])
def test_hooks_on_parameters_change_their_gradients(early):
    """Whether they were registered before sharding or after it."""
    mask = torch.tensor([0.0, 1, 2], dtype=torch.float64)

    def hook(model):
        model.head.bias.register_hook(lambda gradient: gradient * mask)
        model.layers[0].linear.weight.register_hook(lambda gradient: gradient.clamp(min=0))
        return model

    plain = train(hook(made()), batch())

    def run(mesh):
        model = made()
        model = shard_all(hook(model), mesh) if early else hook(shard_all(model, mesh))
        assert_same(train(model, mine(batch(), mesh)), plain)

    on_ranks(run)


# ---- communication of the user's


class Copies(AllGather):
    """Gathers through the communicator that simulated ranks get."""

    def __init__(self):
        self.calls = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls += 1
        output_tensor.copy_(group.all_gather(input_tensor).view(-1))


class Sums(ReduceScatter):
    def __init__(self):
        self.calls = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.calls += 1
        rows = input_tensor.view(group.size, -1)
        output_tensor.copy_(group.reduce_scatter(rows).view(-1))


def test_custom_communication_of_one_group():
    plain = train(made(), batch())

    def run(mesh):
        model = shard_all(made(), mesh)
        gather, reduce = Copies(), Sums()
        model.layers[1].set_custom_all_gather(gather)
        model.layers[1].set_custom_reduce_scatter(reduce)
        train(model, mine(batch(), mesh))
        assert_same(model, plain)
        assert (gather.calls, reduce.calls) == (6, 3)  # in forward and backward of three steps

    on_ranks(run)


def test_a_custom_gather_that_raises_can_be_replaced():
    class Fails(Copies):
        def __call__(self, *args, **kwargs):
            raise OSError("no way")

    def run(mesh):
        model = shard_all(made(), mesh)
        model.layers[1].set_custom_all_gather(Fails())
        with pytest.raises(OSError, match="no way"):
            model(batch())
        model.layers[1].set_custom_all_gather(Copies())
        train(model, mine(batch(), mesh))
        assert_same(model, train(made(), batch()))

    on_ranks(run)


@pytest.mark.parametrize("count", [1, 3])
def test_set_reduce_scatter_max_input_buffers_says_how_many_reductions_may_be_under_way(count):
    plain = made()
    mean_square(plain, batch()).backward()

    def run(mesh):
        model = apart(shard_all(made(), mesh))
        model.set_reduce_scatter_max_input_buffers(count)
        model.set_is_last_backward(False)
        mean_square(model, mine(batch(), mesh)).backward()
        queue = model._fsdp_group.schedule.reduce_queue
        assert len(queue._in_flight) == min(count + 1, 4)
        model.reset_iter_state()
        model.set_is_last_backward(True)
        mean_square(model, mine(batch(), mesh)).backward()
        model.zero_grad()
        mean_square(model, mine(batch(), mesh)).backward()
        assert_same(model, plain)
        with pytest.raises(sw.fsdp.FSDPError, match="max_input_buffers: expected a number from 1"):
            model.set_reduce_scatter_max_input_buffers(0)

    on_ranks(run)


def test_the_next_forward_waits_for_the_event_of_the_optimizer_once():
    class Event:
        waits = 0

        def wait(self, stream=None):
            self.waits += 1

    def run(mesh):
        model = shard_all(made(), mesh)
        event = Event()
        model.set_post_optim_event(event)
        assert event.waits == 0
        for _ in range(2):
            model(batch())
            assert event.waits == 1
        model.set_post_optim_event(torch.Event(device="cpu"))  # has nothing to wait for
        model(batch())

    on_ranks(run)
