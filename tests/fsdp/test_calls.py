"""Sharded modules are called as any other: several times, in parts, with and without gradients."""

import pytest
import torch
import torch.nn.functional as F
from support.fsdp_cases import (
    WIDTH,
    Block,
    Net,
    assert_at_rest,
    assert_close,
    assert_same,
    batch,
    check_trains_as_one,
    made,
    mean_square,
    mine,
    on_ranks,
    shard_all,
    train,
)
from support.rules import heard
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

# ---- forwards and backwards


def both_then_backward(model, x):
    return (model(x) * model(2 * x)).mean()


def three_then_backward(model, x):
    with_inputs = [(x * scale).requires_grad_() for scale in (1, 2, 3)]
    return sum(model(each).square().mean() for each in with_inputs)


def of_its_own_output(model, x):
    return model.layers[1](model.layers[1](x)).square().mean() + mean_square(model, x)


def check_step(step):
    """A step gives every rank what it gives one process, and leaves nothing under way."""
    plain = step(made(), batch())

    def run(mesh):
        model = step(shard_all(made(), mesh), mine(batch(), mesh))
        assert_same(model, plain)
        assert_at_rest(model)

    on_ranks(run)


@pytest.mark.parametrize("loss", [both_then_backward, three_then_backward, of_its_own_output])
@pytest.mark.parametrize("reshard", [True, False])
def test_several_forwards_before_one_backward(loss, reshard):
    def shard(model, mesh):
        shard_all(model, mesh, reshard_after_forward=reshard)

    check_trains_as_one(Net, shard, loss=loss)


@pytest.mark.parametrize("in_order", [True, False])
def test_two_forwards_and_then_two_backwards(in_order):
    def step(model, x):
        losses = [mean_square(model, x), mean_square(model, x * x)]
        for each in losses if in_order else reversed(losses):
            each.backward()
        return model

    check_step(step)


class Repeats(nn.Module):
    """Uses a layer twice, and once more within another."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        first, second = self.layers
        x = first(second(first(x)))
        return first(first(x))


def test_a_module_used_several_times_in_one_forward():
    check_trains_as_one(Repeats, shard_all)


def test_a_retained_graph_can_be_run_again():
    class Frozen(nn.Module):
        """The frozen one is needed in backward after all gradients of parameters are there."""

        def __init__(self):
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 3))])
            self.layers[0][0].requires_grad_(False)

        def forward(self, x):
            return self.layers[0](torch.tanh(self.first(x)))

    def step(model, x):
        loss = mean_square(model, x)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        (loss * 2).backward()
        return model

    plain = step(made(Frozen), batch())

    def run(mesh):
        model = step(shard_all(made(Frozen), mesh), mine(batch(), mesh))
        assert_same(model, plain)
        assert_at_rest(model)

    on_ranks(run)


@pytest.mark.parametrize("alone", [True, False])
def test_gradients_of_gradients(alone):
    """A penalty on the gradient of an input, by itself or with a loss beside it."""

    def penalty(model, x):
        x = x.clone().requires_grad_()
        output = model(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        result = gradient.square().sum(-1).mean()
        return result if alone else result + output.square().mean()

    check_trains_as_one(Net, shard_all, loss=penalty)


def test_an_old_graph_that_is_still_there_keeps_nothing_gathered():
    def run(mesh):
        model = shard_all(made(), mesh)
        model.layers[0].requires_grad_(False)
        x = mine(batch(), mesh)
        old = [model(x), mean_square(model, x.clone().requires_grad_())]
        old[1].backward()
        early = []
        model.layers[0].norm.register_full_backward_hook(
            lambda *_: early.append(model.layers[2]._fsdp_group.units[0].gathered_bytes)
        )
        mean_square(model, x.clone().requires_grad_()).backward()
        assert early == [0] and len(old) == 2

    on_ranks(run)


def test_the_gradient_of_an_input_without_those_of_parameters():
    plain, x = made(), batch().requires_grad_()
    (expected,) = torch.autograd.grad(plain(x).square().mean(), x)

    def run(mesh):
        model = shard_all(made(), mesh)
        own = mine(batch(), mesh).requires_grad_()
        (found,) = torch.autograd.grad(model(own).square().mean(), own)
        assert_close(found, mine(expected, mesh) * mesh.size())
        assert_at_rest(model)
        assert all(each.grad is None for each in model.parameters())
        train(model, mine(batch(), mesh))
        assert_same(model, trained)

    trained = train(made(), batch())
    on_ranks(run)


# ---- checkpoints of activations


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("reshard", [True, False])
def test_activation_checkpoints_around_and_within_sharded_blocks(use_reentrant, inside, reshard):
    class Inner(Block):
        def forward(self, x):
            if not inside:
                return super().forward(x)
            return checkpoint(super().forward, x, use_reentrant=use_reentrant)

    class Checkpointed(Net):
        def __init__(self):
            super().__init__(0)
            self.layers.extend(Inner() for _ in range(3))

        def forward(self, x):
            x = x.requires_grad_()
            for layer in self.layers:
                x = layer(x) if inside else checkpoint(layer, x, use_reentrant=use_reentrant)
            return self.head(x)

    def shard(model, mesh):
        shard_all(model, mesh, reshard_after_forward=reshard)

    check_trains_as_one(Checkpointed, shard)


# ---- evaluation


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("reshard", [None, True, False, 2])
def test_evaluation_between_training_steps(mode, reshard):
    plain = train(made(), batch(), 2)
    with torch.no_grad():
        expected = plain(batch())
    train(plain, batch(), 2)

    def run(mesh):
        model = shard_all(made(), mesh, reshard_after_forward=reshard)
        with mode():
            model(batch())  # the first forward of all
        train(model, mine(batch(), mesh), 2)
        for _ in range(2):
            with mode():
                assert_close(model(batch()), expected)
        if reshard is not False:
            assert_at_rest(model)
        train(model, mine(batch(), mesh), 2)
        assert_same(model, plain)
        assert_at_rest(model)

    on_ranks(run, 4)


def test_parameters_that_stay_gathered_are_gathered_again_when_their_shards_change():
    def run(mesh):
        model = shard_all(made(), mesh, reshard_after_forward=False)
        other = made()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5)
            model(batch())
            events, _ = heard(mesh, lambda: model(batch()))
            assert events == []
            model.load_state_dict(other.state_dict())
            assert_close(model(batch()), other(batch()))
            model.head.bias.zero_()
            other.head.bias.zero_()
            assert_close(model(batch()), other(batch()))
        train(other, batch())
        train(model, mine(batch(), mesh))
        assert_same(model, other)

    on_ranks(run)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_parameters_that_stay_gathered_follow_any_optimizer(options):
    def steps(model, x):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **options)
        for _ in range(3):
            optimizer.zero_grad()
            mean_square(model, x).backward()
            optimizer.step()
        return model

    plain = steps(made(), batch())

    def run(mesh):
        model = shard_all(made(), mesh, reshard_after_forward=False)
        model.set_reshard_after_backward(False)
        assert_same(steps(model, mine(batch(), mesh)), plain)

    on_ranks(run)


def test_what_was_kept_on_fewer_ranks_or_gathered_early_is_not_used_once_shards_change():
    def run(mesh):
        model = shard_all(made(), mesh, reshard_after_forward=2)
        plain = made()
        model(batch())  # without a backward
        model.layers[0].unshard()  # the others, which travel with it, are under way
        with torch.no_grad():
            for each in (model, plain):
                for parameter in each.parameters():
                    parameter.mul_(1.5)
        assert_close(model(batch()), plain(batch()))

    on_ranks(run, 4)


def test_how_much_to_keep_may_be_set_between_forward_and_backward():
    plain = made()
    mean_square(plain, batch()).backward()

    def run(mesh):
        model = shard_all(made(), mesh, reshard_after_forward=2)
        loss = mean_square(model, mine(batch(), mesh))
        model.set_reshard_after_forward(True)
        loss.backward()
        assert_same(model, plain)

    on_ranks(run, 4)


# ---- in parts


def test_a_childs_forward_before_the_roots():
    plain = made()
    expected = plain.layers[1](batch())
    expected.square().mean().backward()
    train(plain, batch())

    def run(mesh):
        model = shard_all(made(), mesh)
        output = model.layers[1](mine(batch(), mesh))
        assert_close(output, mine(expected, mesh))
        output.square().mean().backward()
        train(model, mine(batch(), mesh))
        assert_same(model, plain)
        assert_at_rest(model)

    on_ranks(run)


def test_a_childs_graph_made_before_the_roots_first_forward():
    def step(model, x):
        early = model.layers[1](x)
        (mean_square(model, x) + early.square().mean()).backward()
        return model

    check_step(step)


class Outside(nn.Module):
    """Uses a child's parameters without calling it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), nn.Linear(WIDTH, WIDTH, bias=False)])

    def forward(self, x):
        return F.linear(self.layers[0](x), self.layers[1].weight)


def test_a_childs_parameters_used_outside_of_its_forward():
    def in_the_roots_group(model, mesh):
        fully_shard(model.layers[0], mesh=mesh)
        fully_shard(model, mesh=mesh)

    check_trains_as_one(Outside, in_the_roots_group)


def test_a_childs_parameters_used_outside_of_its_forward_after_unshard():
    class Unshards(Outside):
        def forward(self, x):
            if isinstance(self.layers[1], FSDPModule):
                self.layers[1].unshard()
            return super().forward(x)

    check_trains_as_one(Unshards, shard_all)


def test_modules_of_one_group_with_a_loss_in_chunks():
    class Chunked(Net):
        def __init__(self):
            super().__init__(1)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x):
            hidden = self.norm(self.layers[0](x))
            return [self.head(part).square().mean() for part in hidden.chunk(2)]

    def shard(model, mesh):
        assert fully_shard([model.norm, model.head], mesh=mesh) == [model.norm, model.head]
        shard_all(model, mesh)

    check_trains_as_one(Chunked, shard, loss=lambda model, x: sum(model(x)) / 2)


def test_a_head_applied_chunk_by_chunk_outside_of_the_model():
    class Headless(Net):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    def loss(model, x):
        hidden = model(x)
        return sum(model.head(part).square().mean() for part in hidden.chunk(2)) / 2

    def shard(model, mesh):
        fully_shard(model.head, mesh=mesh)
        shard_all(model, mesh)

    check_trains_as_one(Headless, shard, loss=loss)


def test_another_method_may_gather_as_forward_does():
    class Encodes(Net):
        def encode(self, x, *, scale):
            return self.head(self.layers[0](x)) * scale

    def loss(model, x):
        return model.encode(x, scale=2.0).square().mean()

    def shard(model, mesh):
        shard_all(model, mesh)
        register_fsdp_forward_method(model, "encode")

    check_trains_as_one(Encodes, shard, loss=loss)

    def run(mesh):
        model = made(Encodes)
        register_fsdp_forward_method(model, "anything")  # it is not sharded: nothing happens
        shard_all(model, mesh)
        with pytest.raises(sw.fsdp.FSDPError, match=r"method_name: .*FSDPEncodes.*'decode'"):
            register_fsdp_forward_method(model, "decode")

    on_ranks(run)
