"""The state of a ShardedOptimizer: whole, saved, and loaded for other shards."""

import copy
import io

import pytest
import torch
from support.sharded_modules import (
    Recommender,
    cut,
    in_order,
    permuted,
    whole,
)
from support.sharded_optimizers import (
    check,
    expected_after,
    sharded_optimizer,
    train,
    uneven,
)
from support.sharded_tensors import chunks
from torch import nn, optim

import shardwise as sw
from shardwise.core import world
from shardwise.sharded import (
    ShardedOptimizer,
    ShardedStateError,
    ShardedTensor,
    ShardedTensorError,
    named_params_with_sharded_tensor,
)


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
        with pytest.raises(ShardedStateError, match="cannot be pickled or copied"):
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
        rank = world.current().rank
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
        if world.current().rank == 0:
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
