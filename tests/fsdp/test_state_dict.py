"""Values of sharded modules: state dicts, initialisation on the meta device, casts, optimizers."""

import pytest
import torch
from support.fsdp_cases import (
    WIDTH,
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

import shardwise as sw
from shardwise import DTensor, Replicate, Shard
from shardwise.api.optimizers import OptimizerError
from shardwise.fsdp import FSDPModule, StateError, fully_shard, replicate


def other():
    """A model with other values."""
    torch.manual_seed(5)
    return Net().double()


# ---- state dicts


def test_a_state_dict_is_of_dtensors_with_global_shapes():
    def run(mesh):
        model = shard_all(made(), mesh)
        plain = made().state_dict()
        for when in ("at first", "after a forward", "while gathered"):
            if when == "after a forward":
                model(batch())
            if when == "while gathered":
                model.layers[0].unshard()
            state = model.state_dict()
            assert list(state) == list(plain)
            for name, value in state.items():
                assert type(value) is DTensor and not value.requires_grad
                assert value.shape == plain[name].shape and value.placements == (Shard(0),)
                assert_close(value.full_tensor(), plain[name])
        assert type(model.layers[0].linear.weight) is nn.Parameter  # as unshard has left it

    on_ranks(run)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", ["plain", "sharded", "of another layout"])
@pytest.mark.parametrize("when", ["at first", "after a forward", "while gathered"])
def test_load_state_dict_takes_dtensors_and_plain_tensors(when, kind, assign):
    def run(mesh):
        model = shard_all(made(), mesh)
        if when != "at first":
            model(batch())
        if when == "while gathered":
            model.layers[0].unshard()
        if kind == "plain":
            state = other().state_dict()
        elif kind == "sharded":
            state = shard_all(other(), mesh).state_dict()
        else:
            state = replicate(other(), mesh=mesh).state_dict()
        model.load_state_dict(state, assign=assign)
        assert_close(model(batch()), other()(batch()))
        train(model, mine(batch(), mesh))
        assert_same(model, trained)
        assert all(each.placements == (Shard(0),) for each in model.parameters())
        assert_at_rest(model)

    trained = train(other(), batch())
    on_ranks(run)


def test_load_state_dict_is_strict_and_names_what_is_wrong():
    def run(mesh):
        model = shard_all(made(), mesh)
        state = other().state_dict()
        del state["head.bias"]
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict(state)
        found = model.load_state_dict(state | {"more": torch.ones(1)}, strict=False)
        assert found.missing_keys == ["head.bias"] and found.unexpected_keys == ["more"]
        assert_close(full(model.head.weight), state["head.weight"])
        assert_close(full(model.head.bias), made().head.bias.detach())
        state["head.bias"] = torch.ones(7)
        with pytest.raises(RuntimeError, match=r"size mismatch for head.bias"):
            model.load_state_dict(state)

    on_ranks(run)


def test_a_parameter_put_into_a_module_is_what_it_computes_with():
    def run(mesh):
        model = shard_all(made(), mesh)
        model(batch())
        model.head.weight = nn.Parameter(torch.ones(3, WIDTH, dtype=torch.float64))
        plain = made()
        plain.head.weight = nn.Parameter(torch.ones(3, WIDTH, dtype=torch.float64))
        assert_close(model(batch()), plain(batch()))
        assert model.head.weight.placements == (Shard(0),)
        train(model, mine(batch(), mesh))
        assert_same(model, train(plain, batch()))
        model.unshard()
        model.head.bias = plain.head.bias = nn.Parameter(torch.ones(3, dtype=torch.float64))
        model.reshard()
        assert_close(model(batch()), plain(batch()))

    on_ranks(run)


def test_buffers_are_left_alone_and_in_the_state_dict():
    def run(mesh):
        model = fully_shard(nn.BatchNorm1d(WIDTH).double(), mesh=mesh)
        model(mine(batch(), mesh))
        state = model.state_dict()
        assert state["num_batches_tracked"] == 1 and type(state["running_mean"]) is torch.Tensor

    on_ranks(run)


# ---- the meta device


class Resets(Net):
    """A model whose own parameters can be initialised too."""

    def __init__(self):
        super().__init__(2)
        self.scale = nn.Parameter(torch.empty(WIDTH, 3))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.scale, std=0.5)

    def forward(self, x):
        return super().forward(x) @ self.scale.t()


def initialised(model):
    torch.manual_seed(3)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("replicates", [False, True])
def test_initialised_on_the_meta_device_it_is_what_it_is_unsharded(count, replicates):
    """Unsharded is: as replicated DTensors, which draw by position."""

    def unsharded(mesh):
        model = Resets()
        sw.distribute_module(model, mesh)
        return [full(each) for each in initialised(model).parameters()]

    def run(mesh):
        with torch.device("meta"):
            model = Resets()
        if replicates:
            replicate(model, mesh=mesh)
        else:
            shard_all(model, mesh)
        assert all(each.is_meta and type(each) is DTensor for each in model.parameters())
        with pytest.raises(StateError, match=r"scale: it is on the meta device.*to_empty"):
            model(batch().float())
        model.to_empty(device="cpu")
        initialised(model)
        found = [full(each) for each in model.parameters()]
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)
        before = [each.clone() for each in found]
        train(model, mine(batch(6), mesh).float(), 1)
        assert not torch.equal(full(model.scale), before[0])
        assert_at_rest(model)

    (expected,) = on_ranks(unsharded, 1)
    on_ranks(run, count)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_loaded_into_a_model_on_the_meta_device(assign):
    def run(mesh):
        with torch.device("meta"):
            model = Net()
        shard_all(model.double(), mesh)
        if not assign:
            model.to_empty(device="cpu")
        model.load_state_dict(other().state_dict(), assign=assign)
        assert_close(model(batch()), other()(batch()))

    on_ranks(run)


# ---- casts


def test_a_model_is_cast_as_a_whole_and_in_parts():
    def run(mesh):
        model = shard_all(made(), mesh)
        train(model, mine(batch(), mesh), 1)
        plain = train(made(), batch(), 1).float()
        model.float()
        assert all(each.dtype is torch.float32 for each in model.parameters())
        torch.testing.assert_close(model(batch().float()), plain(batch().float()))
        model.layers[1].double()
        plain.layers[1].double()
        hook = lambda module, args: (args[0].to(module.linear.weight.dtype),)  # noqa: E731
        for each in (model, plain):
            each.layers[1].register_forward_pre_hook(hook)
            each.layers[2].register_forward_pre_hook(hook)
        torch.testing.assert_close(model(batch().float()), plain(batch().float()))
        mean_square(model, mine(batch(), mesh).float()).backward()
        assert model.layers[1].linear.weight.grad.dtype is torch.float64
        assert model.layers[0].linear.weight.grad.dtype is torch.float32
        model.layers[0].unshard()
        model.double()  # while it is gathered
        plain.double()
        torch.testing.assert_close(model(batch()), plain(batch()))
        assert all(each.dtype is torch.float64 for each in model.parameters())

    on_ranks(run)


def test_what_is_frozen_or_trained_may_change_at_any_time():
    def steps(model, x):
        for frozen in ("layers.0", "head", ""):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not frozen or not name.startswith(frozen))
            train(model, x, 1)
        return model

    plain = steps(made(), batch())

    def run(mesh):
        assert_same(steps(shard_all(made(), mesh), mine(batch(), mesh)), plain)

    on_ranks(run)


# ---- optimizers


@pytest.mark.parametrize("shard", [fully_shard, replicate])
def test_an_optimizer_made_before_is_refused(shard):
    def run(mesh):
        model = made()
        optimizer = torch.optim.AdamW(model.parameters())
        shard(model, mesh=mesh)
        mean_square(model, mine(batch(), mesh)).backward()
        with pytest.raises(OptimizerError, match=r"AdamW.*layers\.0\.norm\.weight.*after"):
            optimizer.step()

    on_ranks(run)


def test_ranks_get_the_values_of_the_first():
    def run(mesh):
        torch.manual_seed(mesh.get_rank())
        model = Net()
        model.head.weight.note = "kept"
        shard_all(model, mesh)
        assert model.head.weight.note == "kept" and isinstance(model, FSDPModule)
        return [full(each) for each in model.parameters()]

    torch.manual_seed(0)
    expected = [each.detach() for each in Net().parameters()]
    for found in on_ranks(run, 3):
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


def test_replicated_parameters_are_whole_dtensors():
    def run(mesh):
        assert type(fully_shard(made(), mesh=mesh)).__name__ == "FSDPNet"
        model = replicate(made(), mesh=mesh)
        model(batch())
        assert all(each.placements == (Replicate(),) for each in model.parameters())
        assert type(model).__name__ == "ReplicateNet"

    on_ranks(run)


# ---- parameters that were forgotten


def stepped(model, mesh):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        mean_square(model, mine(batch(), mesh)).backward()
        optimizer.step()


def test_an_optimizer_warns_once_of_parameters_that_no_sharded_module_has():
    def run(mesh):
        model = made()
        fully_shard(model.layers[0], mesh=mesh)
        stepped(model, mesh)

    with pytest.warns(
        UserWarning, match=r"AdamW: \d+ of \d+ parameters.* the whole model"
    ) as found:
        sw.simulate(lambda: run(sw.init_device_mesh("cpu", (2,), ("dp",))), 2)
    assert len(found) == 2  # one of each rank


def test_parameters_that_the_user_sees_to_are_no_reason_for_a_warning():
    def run(mesh):
        model = made()
        own = set(model.layers[1].parameters())
        stepped(fully_shard(model, mesh=mesh, ignored_params=own), mesh)

    on_ranks(run)


def test_one_rank_alone_is_no_reason_for_a_warning():
    def run():
        mesh = sw.init_device_mesh("cpu", (1,), ("dp",))
        model = made()
        fully_shard(model.layers[0], mesh=mesh)
        stepped(model, mesh)

    sw.simulate(run, 1)
