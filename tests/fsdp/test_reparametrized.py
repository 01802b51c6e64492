"""prune, parametrize, weight_norm and spectral_norm, before and after a model is sharded."""

import copy

import pytest
import torch
from support.fsdp_cases import (
    assert_same,
    batch,
    full,
    made,
    mine,
    on_ranks,
    replicated,
    shard_all,
    train,
)
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import shardwise as sw
from shardwise.fsdp import StateError, fully_shard
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


CHANGES = {
    "l1": lambda linear: prune.l1_unstructured(linear, "weight", amount=0.3),
    "random": lambda linear: prune.random_unstructured(linear, "weight", amount=0.3),
    "rows": lambda linear: prune.ln_structured(linear, "weight", amount=0.4, n=2, dim=0),
    "bias": lambda linear: prune.l1_unstructured(linear, "bias", amount=2),
    "symmetric": lambda linear: parametrize.register_parametrization(linear, "weight", Symmetric()),
    "spectral norm": parametrizations.spectral_norm,
    "spectral norm, as before": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*is deprecated")
@pytest.mark.parametrize("shard", [shard_all, replicated])
@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_the_model_was_sharded_trains_as_in_one_process(change, has_run, shard):
    def run(mesh):
        torch.manual_seed(0)
        model = made()
        shard(model, mesh)
        if has_run:
            model(batch())
        plain = made()
        for each in (model, plain):
            CHANGES[change](each.layers[1].linear)
        # Masks and first vectors may be random.
        plain.load_state_dict({name: full(each) for name, each in model.state_dict().items()})
        train(model, mine(batch(), mesh))
        train(plain, batch())
        assert_same(model, plain)
        assert list(model.state_dict()) == list(plain.state_dict())

    on_ranks(run)


@pytest.mark.parametrize("name", ["l1", "rows", "bias"])
def test_masks_of_tensor_parallel_modules_are_gathered_over_data_parallel_ranks(name):
    def pruned(model, x):
        CHANGES[name](model[0])
        prune.custom_from_mask(model[2], "weight", torch.arange(40).reshape(5, 8) % 3 > 0)
        train(model, x)
        return model

    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5)).double()
    expected = pruned(copy.deepcopy(start), batch(width=4))

    def run():
        mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        model = copy.deepcopy(start)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])
        rows = batch(width=4).chunk(2)[mesh.get_local_rank("dp")]
        assert_same(pruned(model, rows), expected)

    sw.simulate(run, 4)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_pruned_parameter_may_become_an_ordinary_one_again(is_late):
    def pruned(model, x, shard):
        if not is_late:
            prune.l1_unstructured(model.layers[1].linear, "weight", amount=0.3)
        shard(model)
        if is_late:
            prune.l1_unstructured(model.layers[1].linear, "weight", amount=0.3)
        train(model, x, 1)
        prune.remove(model.layers[1].linear, "weight")
        train(model, x, 1)
        again = copy.deepcopy(model)
        train(again, x, 1)
        return model, again

    expected = pruned(made(), batch(), lambda model: None)

    def run(mesh):
        found = pruned(made(), mine(batch(), mesh), lambda model: shard_all(model, mesh))
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs)

    on_ranks(run)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("change", [parametrizations.weight_norm, nn.utils.weight_norm])
def test_new_parameters_in_the_place_of_one_are_refused_with_the_remedy(change):
    plain = made()
    change(plain.layers[1].linear)
    train(plain, batch())

    def run(mesh):
        model = shard_all(made(), mesh)
        with sw.fallback("replicate"):
            change(model.layers[1].linear)
        with pytest.raises(StateError, match=r"linear.weight: .* apply them before fully_shard"):
            model(batch())
        model = made()
        change(model.layers[1].linear)
        shard_all(model, mesh)
        train(model, mine(batch(), mesh))
        assert_same(model, plain)

    on_ranks(run)
