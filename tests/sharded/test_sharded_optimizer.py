"""ShardedOptimizer, and torch's optimizers on sharded parameters, train as one process does."""

import pytest
import torch
from support.sharded_modules import (
    BAGS,
    Recommender,
    cut,
    in_order,
    permuted,
    whole,
)
from support.sharded_optimizers import (
    CUTS,
    OPTIMIZERS,
    TARGETS,
    check,
    expected_after,
    loss_of,
    sharded_optimizer,
    train,
    uneven,
)
from support.sharded_tensors import chunks
from support.sharded_tensors import cut as boxes
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_

import shardwise as sw
from shardwise import sharded
from shardwise.sharded import (
    ShardedOptimizer,
    ShardedTensorError,
    named_params_with_sharded_tensor,
)

# ---- training


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("cuts", CUTS)
def test_sharded_optimizers_train_as_one_process_does(cuts, kind, count):
    expected = expected_after(kind)

    def run():
        model = cut(Recommender(), CUTS[cuts](count))
        check(model, train(model, sharded_optimizer(model, kind)), expected)

    sw.simulate(run, count)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    ("cuts", "foreach"),
    [("in order", True), ("permuted", False), ("uneven", False), ("uneven", True)],
)
def test_torch_s_optimizers_train_sharded_parameters(cuts, kind, foreach):
    expected = expected_after(kind, clip=0.3)
    optimizer_class, options = OPTIMIZERS[kind]

    def run():
        model = cut(Recommender(), CUTS[cuts](3))
        optimizer = optimizer_class(model.parameters(), foreach=foreach, **options)
        check(model, train(model, optimizer, clip=0.3), expected)

    sw.simulate(run, 3)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_new_optimizer_can_be_given_state_to_load_into(kind):
    def run():
        model, other = (cut(Recommender(), CUTS["uneven"](3)) for _ in range(2))
        stepped, new = (sharded_optimizer(each, kind) for each in (model, other))
        train(model, stepped, 1)
        loss_of(other).backward()
        before = [each.clone() for each in other.parameters()]
        gradients = [each.grad.clone() for each in other.parameters()]
        new.init_state()
        for parameter, value, gradient in zip(other.parameters(), before, gradients, strict=True):
            assert torch.equal(parameter, value) and torch.equal(parameter.grad, gradient)
        expected, made = stepped.state_dict(), new.state_dict()
        assert made["param_groups"] == expected["param_groups"]
        assert made["state"].keys() == expected["state"].keys()
        for name, state in made["state"].items():
            assert state.keys() == expected["state"][name].keys()
        kept = {key: each.clone() for key, each in expected["state"]["table.weight"].items()}
        stepped.init_state()  # has state, which stays
        again = stepped.state_dict()["state"]["table.weight"]
        assert all(torch.equal(again[key], value) for key, value in kept.items())

    sw.simulate(run, 3)


def test_a_model_that_runs_on_its_shards_trains_too():
    def forward(model):
        return nn.functional.cross_entropy(whole(model(BAGS)), TARGETS)

    expected = expected_after("Adam", clip=0.3)

    def run():
        for cuts in (in_order, permuted):
            model = cut(Recommender(), cuts(3))
            losses = train(model, sharded_optimizer(model, "Adam"), clip=0.3, loss=forward)
            check(model, losses, expected)

    sw.simulate(run, 3)


def test_a_rank_may_have_nothing_to_do():
    spec = chunks(0, 1)
    expected = nn.Linear(3, 4)
    expected.weight.detach().fill_(1)
    x = torch.ones(2, 3)

    def run():
        weight = nn.Parameter(spec.shard(torch.ones(4, 3)))
        optimizer = ShardedOptimizer({"weight": weight}, optim.Adam, lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.linear(x, weight.full_tensor()).square().sum().backward()
            assert weight.grad is not None
            optimizer.step()
        state = optimizer.state_dict()["state"]["weight"]
        assert float(state["step"]) == 2
        assert state["exp_avg"].sharding_spec() == spec
        return whole(weight.detach()), whole(state["exp_avg"])

    weight = nn.Parameter(torch.ones(4, 3))
    optimizer = optim.Adam([weight], lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.linear(x, weight).square().sum().backward()
        optimizer.step()
    for found, average in sw.simulate(run, 2):
        torch.testing.assert_close(found, weight.detach())
        torch.testing.assert_close(average, optimizer.state[weight]["exp_avg"])


def test_what_is_written_to_several_shards_reaches_them():
    def run():
        for spec in (chunks(0, 0, 0, 1, 1), boxes(([0], [3], 0), ([3], [1], 1), ([4], [4], 1))):
            weight = nn.Parameter(spec.shard(torch.zeros(8)))
            with torch.no_grad():
                weight.add_(torch.arange(8.0)).mul_(2)
            assert weight.requires_grad
            assert torch.equal(weight.detach(), 2 * torch.arange(8.0))
            product = weight * 3
            product.mul_(weight)
            product.full_tensor().sum().backward()
            assert torch.equal(whole(weight.grad), 6 * 2 * torch.arange(8.0))

    sw.simulate(run, 2)


def test_step_returns_the_loss_of_the_closure_and_runs_hooks():
    def run():
        model = cut(Recommender(), in_order(2))
        optimizer = sharded_optimizer(model, "Adam")
        ran = []
        optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
        optimizer.register_step_post_hook(lambda *_: ran.append("after"))

        def closure():
            ran.append("closure")
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        first, second = optimizer.step(closure), optimizer.step(closure)
        assert second < first
        return ran

    assert sw.simulate(run, 2) == [["before", "closure", "after"] * 2] * 2


def test_hooks_of_the_state_dict_run_and_may_replace_it():
    def run():
        model = cut(Recommender(), in_order(2))
        optimizer = sharded_optimizer(model, "Adam")
        train(model, optimizer)
        ran = []
        optimizer.register_state_dict_pre_hook(lambda optimizer: ran.append("before saving"))
        optimizer.register_state_dict_post_hook(lambda optimizer, saved: {**saved, "note": 1})
        optimizer.register_load_state_dict_pre_hook(
            lambda optimizer, given: {name: each for name, each in given.items() if name != "note"}
        )
        optimizer.register_load_state_dict_post_hook(lambda optimizer: ran.append("loaded"))
        saved = optimizer.state_dict()
        assert saved["note"] == 1
        optimizer.load_state_dict(saved)
        return ran

    assert sw.simulate(run, 2) == [["before saving", "loaded"]] * 2


def test_learning_rate_schedulers_work():
    def run():
        model = cut(Recommender(), in_order(2))
        optimizer = sharded_optimizer(model, "SGD with momentum")
        assert isinstance(optimizer, optim.Optimizer)
        scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for _ in range(2):
            train(model, optimizer, 1)
            scheduler.step()
        return optimizer.param_groups[0]["lr"], scheduler.get_last_lr()

    assert sw.simulate(run, 2) == [(0.05, [0.05])] * 2


def test_gradients_can_be_set_to_zeros_or_to_none():
    def run():
        model = cut(Recommender(), uneven(3))
        optimizer = sharded_optimizer(model, "Adam")
        loss_of(model).backward()
        optimizer.zero_grad(set_to_none=False)
        zeros = [not whole(each.grad).any() for each in model.parameters() if each.grad is not None]
        optimizer.zero_grad()
        return all(zeros), all(each.grad is None for each in model.parameters())

    assert sw.simulate(run, 3) == [(True, True)] * 3


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("order", [0, 1, 2, 3.5, float("inf")])
def test_the_norm_of_gradients_is_that_of_the_whole(order, foreach):
    reference = Recommender()
    loss_of(reference).backward()
    expected = clip_grad_norm_(reference.parameters(), 1e9, order)

    def run():
        for cuts in (in_order, uneven):
            model = cut(Recommender(), cuts(3))
            loss_of(model).backward()
            found = clip_grad_norm_(model.parameters(), 1e9, order, foreach=foreach)
            torch.testing.assert_close(whole(found), expected)
            bias = model.fc1.bias  # of which a rank has nothing
            norm = torch.linalg.vector_norm(bias.grad.float(), order)
            torch.testing.assert_close(
                norm, torch.linalg.vector_norm(reference.fc1.bias.grad.float(), order)
            )

    sw.simulate(run, 3)


# ---- refused


@pytest.mark.parametrize(
    ("named", "optimizer_class", "message"),
    [
        ({}, optim.SGD, "expected at least one parameter"),
        (lambda weight: [weight], optim.SGD, "expected parameters by name"),
        (
            lambda weight: {"one": weight, "two": weight},
            optim.SGD,
            "'two' is the same parameter as 'one'",
        ),
        (lambda weight: {"one": 3}, optim.SGD, "expected tensors by name, got int for 'one'"),
        (lambda weight: {"one": weight}, optim.LBFGS, "LBFGS looks at a parameter as a whole"),
        (lambda weight: {"one": weight}, optim.Adafactor, "Adafactor looks at a parameter"),
    ],
)
def test_a_sharded_optimizer_refuses(named, optimizer_class, message):
    def run():
        weight = nn.Parameter(chunks(0, 0, 1).shard(torch.ones(4, 2)))
        with pytest.raises(ShardedTensorError, match=message):
            ShardedOptimizer(named(weight) if callable(named) else named, optimizer_class)

    sw.simulate(run, 2)


# ---- names


def test_names_come_once_and_with_their_prefix():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.tied = nn.Linear(2, 2)
            self.tied.weight = self.fc.weight
            self.table = sharded.zeros(chunks(0, 0, 1), 4, 2)
            self.again = self.table
            self.scale = nn.Parameter(torch.ones(2))
            self.register_buffer("buffer", sharded.zeros(chunks(0, 0, 1), 4))

    def run():
        model = cut(Model(), {"fc.weight": chunks(0, 0, 1)})
        everything = named_params_with_sharded_tensor(model, prefix="model")
        own = named_params_with_sharded_tensor(model, recurse=False)
        return {name for name, _ in everything}, [name for name, _ in own]

    everything, own = sw.simulate(run, 2)[0]
    names = {"fc.weight", "fc.bias", "tied.bias", "table", "scale"}
    assert everything == {f"model.{name}" for name in names}
    assert sorted(own) == ["scale", "table"]
