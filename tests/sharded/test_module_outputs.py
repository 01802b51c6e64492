"""Outputs and state dicts of modules with sharded parameters."""

import copy

import pytest
import torch
from support.sharded_modules import (
    BAGS,
    HIDDEN,
    WIDTH,
    Recommender,
    cut,
    in_order,
    permuted,
    refused_on_all,
    whole,
)
from support.sharded_tensors import chunks
from support.sharded_tensors import cut as boxes
from torch import nn

import shardwise as sw
from shardwise import sharded
from shardwise.core import world
from shardwise.sharded import (
    ShardingPlan,
    collect_local_shard,
    reshard_output,
    shard_module,
    shard_parameter,
)

TWO = chunks(0, 0, 1)


# ---- outputs


@pytest.mark.parametrize("count", [2, 3, 4])
def test_outputs_are_cut_otherwise_and_collected(count):
    reference = Recommender()
    hidden = torch.tanh(reference.fc1(reference.table(BAGS)))
    hidden.square().sum().backward()
    rows = chunks(0, *reversed(range(count)))

    def run():
        model = Recommender()
        plan = ShardingPlan(in_order(count), {"fc1": rows}, ["fc1"])
        shard_module(model, plan)
        local = model.fc1(model.table(BAGS))
        assert type(local) is torch.Tensor
        torch.tanh(local).square().sum().backward()
        place = count - 1 - world.current().rank
        expected = hidden.chunk(count)[place] if place < len(hidden.chunk(count)) else hidden[:0]
        if count == 4:  # every rank has one row, and the dim is left out
            expected = expected[0]
        torch.testing.assert_close(torch.tanh(local), expected)
        gradient = whole(model.fc1.weight.grad)
        torch.testing.assert_close(gradient, reference.fc1.weight.grad)

    sw.simulate(run, count)


def test_a_dim_is_left_out_on_all_ranks_or_on_none():
    def run():
        found = []
        for rows in (3, 5):
            output = chunks(0, 0, 1, 2).shard(torch.arange(rows * 2.0).view(rows, 2))
            found.append(collect_local_shard(nn.Identity())(output).dim())
        return found

    assert sw.simulate(run, 3) == [[1, 2]] * 3


def test_other_outputs_pass_and_what_is_returned_is_left_as_it_is():
    class Weight(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.arange(8.0).view(4, 2))

        def forward(self):
            return self.weight

    def run():
        plain = collect_local_shard(reshard_output(nn.Identity(), TWO))
        assert plain(3) == 3
        module = Weight()
        shard_parameter(module, "weight", TWO)
        reshard_output(module, chunks(1, 1, 0))
        output = module()
        assert output.sharding_spec() == chunks(1, 1, 0)
        assert module.weight.sharding_spec() == TWO
        (output * output).full_tensor().sum().backward()
        assert torch.equal(whole(module.weight.grad), 2 * torch.arange(8.0).view(4, 2))

    sw.simulate(run, 2)


def test_collecting_several_shards_is_refused_on_all_ranks():
    spec = boxes(([0], [2], 0), ([2], [1], 0), ([3], [2], 1))

    def run():
        collect_local_shard(nn.Identity())(spec.shard(torch.arange(5)))

    assert "rank 0 has 2" in refused_on_all(run)


# ---- state dicts and other things that modules do


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_state_dicts_go_from_any_cut_to_any_other(count, assign):
    expected = Recommender()(BAGS)
    cuts = [in_order, permuted, lambda count: {}]

    def run():
        for source in cuts:
            state = cut(Recommender(), source(count)).state_dict()
            target = cut(Recommender(), in_order(count))
            with torch.no_grad():
                for parameter in target.parameters():
                    parameter.zero_()
            result = target.load_state_dict(state, assign=assign)
            assert not result.missing_keys
            assert not result.unexpected_keys
            assert all(isinstance(each, nn.Parameter) for each in target.parameters())
            assert all(each.requires_grad for each in target.parameters())
            torch.testing.assert_close(whole(target(BAGS)), expected)
            weight = target.fc1.weight
            if not assign:
                assert weight.sharding_spec() == in_order(count)["fc1.weight"]

    sw.simulate(run, count)


def test_a_state_dict_of_another_size_is_refused():
    def run():
        state = cut(nn.Linear(3, 4), {"weight": TWO}).state_dict()
        with pytest.raises(RuntimeError, match="size mismatch"):
            cut(nn.Linear(3, 5), {"weight": TWO}).load_state_dict(state)

    sw.simulate(run, 2)


def test_hooks_save_and_load_attributes():
    class Holder(nn.Module):
        def __init__(self, fill):
            super().__init__()
            self.table = sharded.full(chunks(0, 1, 0), (5, 2), fill)

    def run():
        saved = nn.ModuleDict({"inner": Holder(1.0), "fc": nn.Linear(2, 2)})
        saved.top = sharded.full(TWO, (3,), 2.0)
        saved._register_state_dict_hook(sharded.state_dict_hook)
        state = saved.state_dict(prefix="model.")
        assert set(state) == {"model.inner.table", "model.top", "model.fc.weight", "model.fc.bias"}

        loaded = nn.ModuleDict({"inner": Holder(0.0), "fc": nn.Linear(2, 2)})
        loaded.top = None
        loaded._register_load_state_dict_pre_hook(sharded.pre_load_state_dict_hook, True)
        result = loaded.load_state_dict(
            {name.removeprefix("model."): each for name, each in state.items()}, strict=True
        )
        assert not result.unexpected_keys
        assert torch.equal(loaded.inner.table, saved.inner.table)
        assert torch.equal(loaded.top, saved.top)

    sw.simulate(run, 2)


@pytest.mark.parametrize("count", [2, 3])
def test_a_model_converts_its_parameters_and_gradients_in_place(count):
    def run():
        model = cut(Recommender(), in_order(count))
        model.extra = nn.Parameter(TWO.shard(torch.ones(6).double()))  # rank 2 has none of it
        (whole(model(BAGS)).sum() + whole(model.extra * 2).sum()).backward()
        weight, local = model.fc1.weight, model.fc1.weight.local_tensor()
        model.float()
        assert model.fc1.weight is weight
        assert weight.local_tensor() is local
        assert local.dtype == weight.dtype == weight.metadata().tensor_properties.dtype
        for parameter in model.parameters():
            assert parameter.dtype == torch.float32
            assert parameter.grad.dtype == torch.float32
            assert parameter.requires_grad
        torch.testing.assert_close(whole(model(BAGS)), Recommender().float()(BAGS))
        model.to(torch.bfloat16).double().requires_grad_(False)
        assert not any(each.requires_grad for each in model.parameters())
        model.zero_grad()
        assert all(each.grad is None for each in model.parameters())

    sw.simulate(run, count)


def test_a_copied_model_is_apart():
    def run():
        model = cut(Recommender(), in_order(2))
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.fc1.weight.zero_()
        assert isinstance(other.fc1.weight, nn.Parameter)
        torch.testing.assert_close(whole(model(BAGS)), Recommender()(BAGS))
        assert not whole(other.fc1.weight).any()

    sw.simulate(run, 2)


def test_initialization_does_not_depend_on_the_cut():
    odd = boxes(([0, 0], [HIDDEN, 2], 2), ([0, 2], [3, WIDTH - 2], 0), ([3, 2], [4, WIDTH - 2], 2))

    def initialize(module):
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter)

    def run():
        found = []
        for specs in (in_order(3), permuted(3), {**in_order(3), "fc1.weight": odd}):
            model = cut(Recommender(), specs)
            torch.manual_seed(3)
            model.apply(initialize)
            found.append(whole(model.fc1.weight.detach()))
        return found

    first, second, third = sw.simulate(run, 3)[0]
    assert first.std() > 0
    assert torch.equal(first, second)
    assert torch.equal(first, third)
