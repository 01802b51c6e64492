"""Optimizers that compare losses: a closure's loss is that of all ranks, as gradients are."""

import copy

import pytest
import torch
from support.fsdp_cases import (
    Net,
    assert_close,
    batch,
    full,
    hybrid,
    in_one,
    made,
    mean_square,
    mine,
    on_ranks,
    replicated,
    shard_all,
)
from torch import nn

import shardwise as sw
from shardwise.fsdp import fully_shard


def minimized(model, x, steps=4, returns=lambda loss: loss, **options):
    """Return a model that LBFGS has trained, and the losses that its steps return."""
    options = {"lr": 0.7, "max_iter": 5, "line_search_fn": "strong_wolfe", **options}
    optimizer = torch.optim.LBFGS(model.parameters(), **options)
    calls = []

    def closure():
        calls.append(None)
        optimizer.zero_grad()
        loss = mean_square(model, x) + (model(x) - 1).abs().mean()
        loss.backward()
        return returns(loss.detach())

    losses = [float(torch.as_tensor(optimizer.step(closure)).detach()) for _ in range(steps)]
    return model, losses, len(calls)


def compare(found, expected):
    for ours, theirs in zip(found[0].parameters(), expected[0].parameters(), strict=True):
        torch.testing.assert_close(full(ours), theirs.detach(), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found[1], expected[1])
    assert found[2] == expected[2], "as many calls of the closure"


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("shard", [shard_all, in_one, replicated, hybrid])
@pytest.mark.parametrize("line_search", ["strong_wolfe", None])
def test_lbfgs_minimizes_as_in_one_process(shard, line_search):
    expected = minimized(made(), batch(), line_search_fn=line_search)

    def run():
        mesh = sw.init_device_mesh("cpu", (4,), ("dp",))
        model = made()
        shard(model, mesh)
        compare(minimized(model, mine(batch(), mesh), line_search_fn=line_search), expected)

    sw.simulate(run, 4)


@pytest.mark.parametrize("returns", [lambda loss: loss.item(), lambda loss: loss.float()])
def test_a_loss_may_be_a_number_or_another_dtype(returns):
    expected = minimized(made(), batch(), returns=returns, line_search_fn=None, max_iter=2)

    def run(mesh):
        model = shard_all(made(), mesh)
        x = mine(batch(), mesh)
        found = minimized(model, x, returns=returns, line_search_fn=None, max_iter=2)
        for ours, theirs in zip(found[0].parameters(), expected[0].parameters(), strict=True):
            torch.testing.assert_close(full(ours), theirs.detach(), rtol=1e-3, atol=1e-4)

    on_ranks(run)


def test_the_loss_has_the_scale_of_the_gradients():
    """A divide factor of 1 sums over ranks, so the loss is a sum, too."""

    def run(mesh):
        model = fully_shard(made(), mesh=mesh)
        model.set_gradient_divide_factor(1.0)
        plain = made()
        optimizers = [torch.optim.LBFGS(each.parameters()) for each in (model, plain)]
        found = []
        for each, optimizer, x in (
            (model, optimizers[0], mine(batch(), mesh)),
            (plain, optimizers[1], batch()),
        ):

            def closure(each=each, optimizer=optimizer, x=x):
                optimizer.zero_grad()
                loss = each(x).square().sum()
                loss.backward()
                return loss.detach()

            found.append(float(optimizer.step(closure)))
        assert_close(torch.tensor(found[0]), torch.tensor(found[1]))
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(ours), theirs.detach(), rtol=1e-6, atol=1e-8)

    on_ranks(run)


def test_a_pointwise_optimizer_returns_the_rank_s_own_loss_and_sends_nothing():
    def run(mesh):
        model = shard_all(made(), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = mine(batch(), mesh)
        own = mean_square(model, x)
        own.backward()
        assert torch.equal(optimizer.step(lambda: own), own)

    on_ranks(run)


def test_parameters_that_are_averaged_differently_have_no_common_loss():
    def run(mesh):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        model[0].set_gradient_divide_factor(1.0)
        optimizer = torch.optim.LBFGS(model.parameters())
        with pytest.raises(sw.OptimizerError, match=r"LBFGS: expected parameters .* 2 kinds"):
            optimizer.step(lambda: model(torch.ones(1, 3)).sum())

    on_ranks(run)


def test_a_model_that_is_not_data_parallel_keeps_its_closure():
    def run(mesh):
        plain = copy.deepcopy(made(Net))
        rank = mesh.get_rank()
        _, losses, _ = minimized(plain, batch(seed=rank), steps=1)
        return losses

    found = on_ranks(run)
    assert found[0] != found[1]
