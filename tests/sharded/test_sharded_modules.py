"""shard_parameter and shard_module: parameters, plans, Sharders, refused arguments."""

import copy
from collections import OrderedDict

import pytest
import torch
from support.sharded_modules import (
    BAGS,
    CUTS,
    Recommender,
    cut,
    refused_on_all,
    whole,
)
from support.sharded_tensors import chunks
from torch import nn

import shardwise as sw
from shardwise import sharded
from shardwise.core import world
from shardwise.core.mesh import init_device_mesh
from shardwise.sharded import (
    ShardedStateError,
    ShardedTensor,
    ShardedTensorError,
    Sharder,
    ShardingPlan,
    ShardingPlanner,
    collect_local_shard,
    reshard_output,
    shard_module,
    shard_parameter,
    shard_tensor,
)

TWO = chunks(0, 0, 1)


# ---- parameters


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("kind", CUTS)
def test_a_sharded_model_computes_what_the_whole_one_does(kind, count):
    reference = Recommender()
    expected = reference(BAGS)
    expected.square().sum().backward()

    def run():
        model = cut(Recommender(), CUTS[kind](count))
        found = whole(model(BAGS))
        found.square().sum().backward()
        torch.testing.assert_close(found, expected)
        for name, parameter in model.named_parameters():
            gradient = whole(parameter.grad)
            torch.testing.assert_close(gradient, reference.get_parameter(name).grad)

    sw.simulate(run, count)


def test_the_source_rank_s_parameters_are_the_ones():
    def run():
        module = nn.Linear(3, 4)
        nn.init.constant_(module.weight, world.current().rank + 1.0)
        shard_parameter(module, "weight", chunks(0, 2, 0), src_rank=1)
        assert isinstance(module.weight, nn.Parameter)
        return whole(module.weight.detach())

    for found in sw.simulate(run, 3):
        assert torch.equal(found, torch.full((4, 3), 2.0))


def test_a_group_of_some_ranks_shards_for_itself():
    def run():
        mesh = init_device_mesh("cpu", (2, 2), ("outer", "inner"))["inner"]
        first, second = mesh.mesh.flatten().tolist()
        module = nn.Linear(3, 4)
        nn.init.constant_(module.weight, float(first))
        shard_parameter(module, "weight", chunks(0, second, first), process_group=mesh)
        return whole(module.weight.detach()).unique().tolist()

    assert sw.simulate(run, 4) == [[0.0], [0.0], [2.0], [2.0]]


def test_frozen_parameters_stay_frozen_and_others_trainable():
    def run():
        module = nn.Linear(3, 4)
        module.weight.requires_grad_(False)
        cut(module, {"weight": TWO, "bias": TWO})
        return module.weight.requires_grad, module.bias.requires_grad

    assert sw.simulate(run, 2) == [(False, True)] * 2


def test_buffers_and_attributes_stay_what_they_are():
    def run():
        module = nn.Module()
        module.register_buffer("kept", torch.arange(4.0))
        module.register_buffer("left_out", torch.arange(4.0), persistent=False)
        module.attribute = torch.arange(4.0)
        for name in ("kept", "left_out", "attribute"):
            shard_parameter(module, name, TWO)
            assert torch.equal(whole(getattr(module, name)), torch.arange(4.0))
        assert list(module.state_dict()) == ["kept"]
        assert not list(module.parameters())
        assert isinstance(module._buffers["left_out"], ShardedTensor)

    sw.simulate(run, 2)


def test_a_parameter_need_not_be_contiguous():
    def run():
        module = nn.Linear(3, 4)
        module.weight = nn.Parameter(torch.arange(12.0).view(3, 4).t())
        shard_parameter(module, "weight", chunks(1, 1, 0))
        assert torch.equal(whole(module.weight), torch.arange(12.0).view(3, 4).t())

    sw.simulate(run, 2)


def test_tied_parameters_stay_one():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

    def run():
        for plan in ({"second.weight": TWO}, {"first.weight": TWO, "second.weight": TWO}):
            model = cut(Tied(), plan)
            assert isinstance(model.first.weight, ShardedTensor)
            assert model.second.weight is model.first.weight
            assert len(list(model.parameters())) == 3

    sw.simulate(run, 2)
    other = {"first.weight": TWO, "second.weight": chunks(1, 0, 1)}
    message = refused_on_all(lambda: cut(Tied(), other))
    assert "plan['second.weight']: is tied to 'first.weight'" in message


def test_shard_tensor_is_torch_s_under_another_name():
    assert sharded._shard_tensor is shard_tensor
    assert sharded._reshard_output is reshard_output
    assert sharded._collect_local_shard is collect_local_shard

    def run():
        return whole(shard_tensor(torch.arange(5), chunks(0, 1, 0)))

    assert torch.equal(sw.simulate(run, 2)[0], torch.arange(5))


# ---- what does not fit


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        (
            "wieght",
            TWO,
            "param_name: expected a tensor of Linear, got 'wieght'; did you mean 'weight'",
        ),
        ("in_features", TWO, "param_name: expected a tensor of Linear, got 'in_features'"),
        (
            "weight",
            chunks(2, 0, 1),
            "param_name: 'weight', of size (4, 3): dim: expected one of the 2",
        ),
        ("weight", chunks(0, 0, 5), "expected a rank of the process group"),
        ("weight", "rows", "sharding_spec: expected a ShardingSpec"),
    ],
)
def test_shard_parameter_refuses(name, spec, message):
    assert message in refused_on_all(lambda: shard_parameter(nn.Linear(3, 4), name, spec))


def test_what_is_sharded_is_not_sharded_again():
    def run():
        module = nn.Linear(3, 4)
        shard_parameter(module, "weight", TWO)
        shard_parameter(module, "weight", TWO)

    assert "call its reshard(spec)" in refused_on_all(run)


def test_a_lazy_parameter_is_refused():
    message = refused_on_all(lambda: shard_parameter(nn.LazyLinear(4), "weight", TWO))
    assert "run that first" in message


class Replaced(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + 1


class Replace(Sharder):
    def shard(self, module):
        return Replaced(module)


class NoModule(Sharder):
    def shard(self, module):
        return "no module" if world.current().rank == 1 else module


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"plan": {"fc1.wieght": TWO}},
            "plan['fc1.wieght']: expected the name of a parameter; did you",
        ),
        (
            {"plan": {"fc1": TWO}},
            "plan['fc1']: expected the name of a parameter, that is a submodule",
        ),
        (
            {"plan": {"fc1.weight": 3}},
            "plan['fc1.weight']: expected a ShardingSpec for a parameter",
        ),
        (
            {"plan": {"fc3": Replace()}},
            "plan['fc3']: expected the name of a submodule for a Sharder; did",
        ),
        ({"plan": {"": Replace()}}, "plan['']: expected the name of a submodule"),
        ({"plan": {"fc1.weight": TWO, "fc1": Replace()}}, "is inside 'fc1', which has a Sharder"),
        ({"plan": {"table.weight": chunks(5, 0, 1)}}, "plan['table.weight'], of size (11, 5): dim"),
        (
            {"plan": {}, "output_plan": {"fc3": TWO}},
            "output_plan: expected names of submodules, got",
        ),
        ({"plan": {}, "output_plan": {"fc1": 1}}, "output_plan['fc1']: expected a ShardingSpec"),
        ({"plan": {}, "return_local_tensor": ["fc3"]}, "return_local_tensor: expected names"),
        ({"plan": {}, "return_local_tensor": "fc1"}, "return_local_tensor: expected a list"),
    ],
)
def test_a_plan_that_does_not_fit_changes_nothing(plan, message):
    models = []

    def run():
        model = Recommender()
        models.append(model)
        plan["plan"].setdefault("fc2.weight", TWO)  # this would fit
        shard_module(model, ShardingPlan(**plan))

    assert message in refused_on_all(run)
    for model in models:
        assert not any(isinstance(each, ShardedTensor) for each in model.parameters())
        assert isinstance(model.fc1, nn.Linear)


def test_what_one_rank_objects_to_is_refused_on_all():
    def run():
        rank = world.current().rank
        name = "fc1.weight" if rank == 0 else "fc1.wait"
        with pytest.raises(ShardedTensorError) as error:
            shard_module(Recommender(), ShardingPlan({name: TWO}))
        with pytest.raises(ShardedTensorError, match="expected the same on every rank"):
            shard_module(Recommender(), ShardingPlan({"fc1.weight": chunks(rank, 0, 1)}))
        return str(error.value)

    for message in sw.simulate(run, 2):
        assert message.startswith("rank 1: plan['fc1.wait']: expected the name of a parameter")


class OfTwo(sharded.ShardingSpec):
    """A spec without `==`: two of them are never equal."""

    def build_metadata(self, tensor_sizes, tensor_properties):
        return chunks(0, 1, 0).build_metadata(tensor_sizes, tensor_properties)


def test_a_spec_of_the_users_own_in_a_plan_need_not_be_comparable():
    def run():
        model = Recommender()
        shard_module(model, ShardingPlan({"fc1.weight": OfTwo()}, {"fc1": OfTwo()}))
        assert isinstance(model.fc1.weight.sharding_spec(), OfTwo)

    sw.simulate(run, 2)


def test_an_error_of_the_users_own_spec_on_one_rank_is_told_to_all():
    class Broken(sharded.ChunkShardingSpec):
        def build_metadata(self, tensor_sizes, tensor_properties):
            return {}["no"]

    def run():
        spec = Broken(0, ["rank:0/cpu"]) if world.current().rank == 1 else TWO
        with pytest.raises(ShardedStateError, match="rank 1: KeyError: 'no'"):
            shard_parameter(nn.Linear(3, 4), "weight", spec)

    sw.simulate(run, 2)


# ---- submodules


def test_a_sharder_s_module_takes_the_place_of_the_submodule():
    model = nn.Sequential(OrderedDict(fc1=nn.Linear(2, 2), fc10=nn.Linear(2, 2)))
    model.append(model.fc1)  # in two places
    x = torch.randn(3, 2)
    expected = model.fc1(model.fc10(model.fc1(x) + 1)) + 1

    def run():
        mine = copy.deepcopy(model)
        # "fc10" only begins like "fc1".
        shard_module(mine, ShardingPlan({"fc1": Replace(), "fc10.weight": TWO}))
        assert not hasattr(mine, "mod_name")
        assert isinstance(mine.fc1, Replaced)
        assert mine[2] is mine.fc1
        assert isinstance(mine.fc10.weight, ShardedTensor)
        torch.testing.assert_close(whole(mine(x)), expected)

    sw.simulate(run, 2)


def test_a_sharder_that_gives_no_module_is_refused():
    """All ranks raise, even if a single rank has the problem, and nothing is changed."""

    def run():
        model = Recommender()
        plan = ShardingPlan({"fc1": NoModule(), "fc2.weight": chunks(0, 0, 1)})
        with pytest.raises(ShardedTensorError, match=r"expected a module from NoModule\.shard"):
            shard_module(model, plan)
        assert not isinstance(model.fc2.weight, ShardedTensor)

    sw.simulate(run, 2)


def test_sharders_inside_each_other_are_refused():
    plan = ShardingPlan({"0": Replace(), "0.fc1": Replace()})
    message = refused_on_all(lambda: shard_module(nn.Sequential(Recommender()), plan))
    assert "plan['0.fc1']: is inside '0', which has a Sharder of its own" in message


def test_a_planner_makes_plans():
    class Rows(ShardingPlanner):
        def build_plan(self, module):
            return ShardingPlan({name: TWO for name, _ in module.named_parameters()})

    def run():
        model = Recommender()
        shard_module(model, Rows().build_plan(model))
        return all(isinstance(each, ShardedTensor) for each in model.parameters())

    assert sw.simulate(run, 2) == [True, True]
