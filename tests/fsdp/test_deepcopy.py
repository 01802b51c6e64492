"""copy.deepcopy of sharded modules: averages of weights, copies of a child, copies that train."""

import copy

import pytest
import torch
from support.fsdp_cases import (
    Net,
    assert_at_rest,
    assert_close,
    assert_same,
    batch,
    full,
    made,
    mean_square,
    mine,
    on_ranks,
    shard_all,
    train,
)
from torch import nn

from shardwise.fsdp import FSDPError, FSDPModule, fully_shard, replicate


def averaged(model, x):
    """Some steps, and the average of the weights along the way."""
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        mean_square(model, x).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.3)
            average(x)  # it runs along
    return average


@pytest.mark.parametrize("when", ["before a forward", "after a forward"])
def test_an_average_of_weights_follows_the_model(when):
    plain = made()
    expected = averaged(plain, batch())

    def run(mesh):
        model = shard_all(made(), mesh)
        if when == "after a forward":
            model(batch())
        average = averaged(model, mine(batch(), mesh))
        assert_same(model, plain)
        assert_same(average, expected)
        assert_close(average(batch()), expected(batch()))
        assert_at_rest(average)

    on_ranks(run)


def test_torchs_own_averages():
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    def run(model, x):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            mean_square(model, x).backward()
            optimizer.step()
            average.update_parameters(model)
        return average.module

    expected = run(made(), batch())

    def on_rank(mesh):
        average = run(shard_all(made(), mesh), mine(batch(), mesh))
        for ours, theirs in zip(average.parameters(), expected.parameters(), strict=True):
            assert_close(full(ours), theirs.detach())

    on_ranks(on_rank)


@pytest.mark.parametrize("shard", [shard_all, lambda model, mesh: replicate(model, mesh=mesh)])
def test_a_copy_trains_on_its_own(shard):
    plain = train(made(), batch())
    before = made()

    def run(mesh):
        model = made()
        shard(model, mesh)
        model(mine(batch(), mesh)).square().mean().backward()
        model.zero_grad()
        again = copy.deepcopy(model)
        assert isinstance(again, FSDPModule) and type(again) is type(model)
        train(again, mine(batch(), mesh))
        assert_same(again, plain)
        for ours, theirs in zip(model.parameters(), before.parameters(), strict=True):
            assert_close(full(ours), theirs.detach())
        train(model, mine(batch(), mesh))
        assert_same(model, plain)

    on_ranks(run)


def test_a_copy_has_gradients_settings_and_ties():
    def run(mesh):
        model = made()
        model.layers[2].linear.weight = model.layers[0].linear.weight
        shard_all(model, mesh)
        model.set_gradient_divide_factor(4)
        mean_square(model, mine(batch(), mesh)).backward()
        again = copy.deepcopy(model)
        assert again.layers[2].linear.weight is again.layers[0].linear.weight
        assert again._fsdp_group.settings.divide_factor == 4
        assert again.head.weight.grad is not model.head.weight.grad
        assert_close(full(again.head.weight.grad), full(model.head.weight.grad))

    on_ranks(run)


def test_a_copy_of_a_child_alone():
    plain = made()
    expected = train(copy.deepcopy(plain.layers[1]), batch())

    def run(mesh):
        model = shard_all(made(), mesh)
        model(batch())
        child = copy.deepcopy(model.layers[1])
        train(child, mine(batch(), mesh))
        assert_same(child, expected)
        assert_at_rest(child)
        train(model, mine(batch(), mesh))

    on_ranks(run)


def test_a_graph_of_a_copied_child_outlives_the_first_forward_of_its_root():
    plain = made()
    (mean_square(plain.layers[1], batch()) + mean_square(plain, batch())).backward()

    def run(mesh):
        model = copy.deepcopy(shard_all(made(), mesh))
        x = mine(batch(), mesh)
        (mean_square(model.layers[1], x) + mean_square(model, x)).backward()
        assert_same(model, plain)

    on_ranks(run)


def test_a_copy_made_while_parameters_are_gathered():
    def run(mesh):
        model = shard_all(made(), mesh, reshard_after_forward=False)
        with torch.no_grad():
            model(batch())
        again = copy.deepcopy(model)
        train(again, mine(batch(), mesh))
        assert_same(again, train(made(), batch()))
        model.layers[0].unshard()
        third = copy.deepcopy(model)
        train(third, mine(batch(), mesh))
        assert_same(third, train(made(), batch()))
        model.layers[0].reshard()
        train(model, mine(batch(), mesh))
        assert_same(model, train(made(), batch()))

    on_ranks(run)


def test_parts_of_a_sharded_sequential_are_plain_ones():
    def run(mesh):
        model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3))).double()
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert type(model[:2]) is nn.Sequential
        assert_close(model[:2](batch()), model[1](model[0](batch())))

    on_ranks(run)


def test_a_sharded_module_is_not_pickled():
    import pickle

    def run(mesh):
        model = shard_all(made(Net), mesh)
        with pytest.raises(FSDPError, match=r"pickle: FSDPNet .*state_dict"):
            pickle.dumps(model)

    on_ranks(run)
