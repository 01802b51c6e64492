"""ShardedOptimizer, and torch's optimizers on sharded parameters, train as one process does."""

import copy
import io

import pytest
import torch
from shard_cases import chunks
from shard_cases import cut as boxes
from sharded_module_cases import (
    BAGS,
    CLASSES,
    HIDDEN,
    Recommender,
    cut,
    in_order,
    permuted,
    whole,
)
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_

import shardwise as sw
from shardwise import sharded
from shardwise.sharded import (
    ShardedOptimizer,
    ShardedStateError,
    ShardedTensor,
    ShardedTensorError,
    named_params_with_sharded_tensor,
)

TARGETS = torch.tensor([0, 2, 1, 0])


def uneven(count):
    """Several shards per rank, of a rank none, of another size each; a bias on two ranks."""
    last = count - 1
    return {
        "table.weight": chunks(0, *range(count), *range(count)),
        "fc1.bias": boxes(([0], [1], last), ([1], [HIDDEN - 1], 0)),
        "fc2.weight": boxes(
            ([0, 0], [CLASSES, 2], last),
            ([0, 2], [1, HIDDEN - 2], 0),
            ([1, 2], [CLASSES - 1, HIDDEN - 2], last),
        ),
    }


CUTS = {"in order": in_order, "permuted": permuted, "uneven": uneven}
OPTIMIZERS = {
    "SGD with momentum": (optim.SGD, {"lr": 0.2, "momentum": 0.9, "nesterov": True}),
    "Adam": (optim.Adam, {"lr": 0.05, "amsgrad": True}),
    "AdamW": (optim.AdamW, {"lr": 0.05}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1}),
}


def loss_of(model):
    """The loss, with each parameter used as it is cut: those that are no layout as a whole."""
    named = {name: whole(each) for name, each in named_params_with_sharded_tensor(model)}
    logits = torch.func.functional_call(model, named, (BAGS,))
    return nn.functional.cross_entropy(logits, TARGETS)


def sharded_optimizer(model, kind):
    optimizer_class, options = OPTIMIZERS[kind]
    named = dict(named_params_with_sharded_tensor(model))
    return ShardedOptimizer(named, optimizer_class, **options)


def train(model, optimizer, steps=3, clip=None, loss=loss_of):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        here = loss(model)
        here.backward()
        if clip is not None:
            losses.append(clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        losses.append(here.item())
    return losses


def expected_after(kind, steps=3, clip=None):
    model = Recommender()
    optimizer_class, options = OPTIMIZERS[kind]
    losses = train(model, optimizer_class(model.parameters(), **options), steps, clip)
    return dict(model.named_parameters()), losses


def check(model, losses, expected):
    parameters, expected_losses = expected
    assert losses == pytest.approx(expected_losses, rel=1e-10)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole(parameter.detach()), parameters[name].detach())


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


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("cuts", CUTS)
def test_torch_s_optimizers_train_sharded_parameters(cuts, kind, foreach):
    expected = expected_after(kind, clip=0.3)
    optimizer_class, options = OPTIMIZERS[kind]

    def run():
        model = cut(Recommender(), CUTS[cuts](3))
        optimizer = optimizer_class(model.parameters(), foreach=foreach, **options)
        check(model, train(model, optimizer, clip=0.3), expected)

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


# ---- saved and loaded


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("kind", ["SGD with momentum", "Adam"])
@pytest.mark.parametrize(("before", "after"), [(in_order, uneven), (uneven, permuted)])
def test_training_goes_on_when_the_state_is_loaded_into_another_cut(before, after, kind, count):
    expected = expected_after(kind, steps=4)

    def run():
        model = cut(Recommender(), before(count))
        optimizer = sharded_optimizer(model, kind)
        losses = train(model, optimizer, 2)
        state, parameters = optimizer.state_dict(), model.state_dict()

        other = cut(Recommender(), after(count))
        other.load_state_dict(parameters)
        resumed = sharded_optimizer(other, kind)
        for group in resumed.param_groups:
            group["lr"] = 77.0
        resumed.load_state_dict(state)
        saved = {name: whole(each) for name, each in state["state"]["fc2.weight"].items()}
        losses += train(other, resumed, 2)
        check(other, losses, expected)
        now = state["state"]["fc2.weight"]
        assert all(torch.equal(whole(now[name]), each) for name, each in saved.items())

    sw.simulate(run, count)


def test_the_state_dict_is_by_name_and_cut_as_the_parameters():
    def run():
        model = cut(Recommender(), uneven(3))
        optimizer = sharded_optimizer(model, "Adam")
        assert optimizer.state_dict()["state"] == {}
        train(model, optimizer, 2)
        saved = optimizer.state_dict()
        names = [name for name, _ in model.named_parameters()]
        assert list(saved["state"]) == names
        (group,) = saved["param_groups"]
        assert group["params"] == names
        assert group["lr"] == 0.05
        for name, state in saved["state"].items():
            parameter = model.get_parameter(name)
            assert float(state["step"]) == 2
            for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                assert type(state[key]) is (
                    ShardedTensor if isinstance(parameter, ShardedTensor) else torch.Tensor
                )
                assert not state[key].requires_grad
                if isinstance(parameter, ShardedTensor):
                    assert state[key].sharding_spec() == parameter.sharding_spec()

    sw.simulate(run, 3)


def test_whole_state_and_sharded_state_take_each_other_s_place():
    expected = expected_after("Adam", steps=4)

    def run():
        plain = Recommender()
        optimizer = sharded_optimizer(plain, "Adam")
        losses = train(plain, optimizer, 2)
        model = cut(Recommender(), in_order(2))
        model.load_state_dict(plain.state_dict())
        resumed = sharded_optimizer(model, "Adam")
        resumed.load_state_dict(optimizer.state_dict())
        back = sharded_optimizer(plain, "Adam")
        back.load_state_dict(resumed.state_dict())
        check(model, losses + train(model, resumed, 2), expected)
        check(plain, losses + train(plain, back, 2), expected)

    sw.simulate(run, 2)


def test_the_state_dict_can_be_saved_in_a_file():
    expected = expected_after("Adam", steps=3)

    def run():
        model = cut(Recommender(), uneven(3))
        optimizer = sharded_optimizer(model, "Adam")
        losses = train(model, optimizer, 2)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        resumed = sharded_optimizer(model, "Adam")
        resumed.load_state_dict(torch.load(file, weights_only=False))
        check(model, losses + train(model, resumed, 1), expected)
        with pytest.raises(ShardedStateError, match="neither pickled nor copied"):
            copy.deepcopy(optimizer)

    sw.simulate(run, 3)


def test_groups_have_names_and_options_of_their_own():
    reference = Recommender()
    rest = [each for name, each in reference.named_parameters() if name != "table.weight"]
    plain = optim.SGD([{"params": rest}, {"params": reference.table.weight, "lr": 0.7}], lr=0.1)
    train(reference, plain, 3)

    def run():
        model = cut(Recommender(), uneven(3))
        named = dict(named_params_with_sharded_tensor(model))
        table = {"table.weight": named.pop("table.weight")}
        optimizer = ShardedOptimizer(named, optim.SGD, lr=0.1)
        optimizer.add_param_group({"params": table, "lr": 0.7})
        train(model, optimizer, 3)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(whole(parameter), reference.get_parameter(name))
        saved = optimizer.state_dict()
        assert [group["lr"] for group in saved["param_groups"]] == [0.1, 0.7]
        assert saved["param_groups"][1]["params"] == ["table.weight"]
        saved["param_groups"].reverse()  # groups are known by their names
        saved["param_groups"][0]["lr"] = 0.9
        optimizer.load_state_dict(saved)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.9]
        with pytest.raises(ShardedTensorError, match=r"'table.weight' is in another group"):
            optimizer.add_param_group({"params": table})

    sw.simulate(run, 3)


def test_a_state_dict_that_does_not_fit_changes_nothing_on_any_rank():
    def run():
        rank = sw.world.current().rank
        model = cut(Recommender(), in_order(2))
        optimizer = sharded_optimizer(model, "Adam")
        train(model, optimizer, 1)
        good = optimizer.state_dict()
        bad = {
            "has 'state' and": {"state": {}},
            "has ['extra'] besides": {**good, "state": {**good["state"], "extra": {}}},
            "expected size (7, 5), the parameter's; got (3,)": {
                **good,
                "state": {"fc1.weight": {"exp_avg": torch.zeros(3)}},
            },
            "it lacks ['fc2.bias']": {
                **good,
                "param_groups": [{"lr": 9.0, "params": list(optimizer.named_params)[:-1]}],
            },
        }
        for message, state in bad.items():
            for state_dict in (state, state if rank == 1 else good):  # also if one rank's is bad
                with pytest.raises(ShardedTensorError) as error:
                    optimizer.load_state_dict(state_dict)
                assert message.removeprefix("has 'state' and") in str(error.value)
        less = {**good, "state": {}} if rank == 0 else good
        with pytest.raises(ShardedTensorError, match="expected the same on every rank"):
            optimizer.load_state_dict(less)
        whole = copy.deepcopy(good) if rank == 0 else good  # one that the others would wait for
        if rank == 0:
            whole["state"]["fc1.weight"]["exp_avg"] = torch.zeros(7, 5)
        with pytest.raises(ShardedTensorError, match=r"cut alike.*exp_avg"):
            optimizer.load_state_dict(whole)
        assert optimizer.param_groups[0]["lr"] == 0.05
        assert float(optimizer.state_dict()["state"]["fc1.weight"]["step"]) == 1

    sw.simulate(run, 2)


def test_shards_that_were_stepped_apart_have_no_common_state():
    def run():
        weight = nn.Parameter(chunks(0, 0, 1).shard(torch.ones(4)))
        optimizer = ShardedOptimizer({"weight": weight}, optim.Adam)
        if sw.world.current().rank == 0:
            weight.local_tensor().grad = torch.ones(2)
            optimizer.step()
        with pytest.raises(ShardedStateError, match="must have been stepped together"):
            optimizer.state_dict()

    sw.simulate(run, 2)


def test_a_parameter_that_was_cut_otherwise_is_noticed():
    def run():
        model = cut(Recommender(), in_order(2))
        optimizer = sharded_optimizer(model, "Adam")
        model.fc1.weight.reshard(chunks(1, 0, 1))
        with pytest.raises(ShardedStateError, match=r"the shards of 'fc1.weight' are not those"):
            optimizer.step()

    sw.simulate(run, 2)


def test_the_optimizer_goes_on_with_a_model_of_another_dtype():
    def run():
        model = cut(Recommender(), in_order(2))
        optimizer = sharded_optimizer(model, "SGD with momentum")
        model.float()
        before = whole(model.fc1.weight.detach()).clone()
        train(model, optimizer, 1)
        assert not torch.equal(whole(model.fc1.weight.detach()), before)

    sw.simulate(run, 2)


# ---- refused


@pytest.mark.parametrize(
    ("named", "optimizer_class", "message"),
    [
        ({}, optim.SGD, "expected at least one parameter"),
        (lambda weight: [weight], optim.SGD, "expected parameters by name"),
        (lambda weight: {"one": weight, "two": weight}, optim.SGD, "'two' is 'one' once more"),
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
