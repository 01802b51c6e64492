"""Hooks that torch registers in the graph, on parameters of `fully_shard`, which are not in it."""

import warnings

import pytest
import torch
from support.fsdp_cases import (
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
from torch.autograd.graph import register_multi_grad_hook

from shardwise.fsdp import replicate

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of TorchScript
    from torch.distributed.optim import _apply_optimizer_in_backward


def replicated(model, mesh):
    return replicate(model, mesh=mesh)


def in_one_process(mode):
    model, seen = made(), []
    register_multi_grad_hook(list(model.parameters()), seen.append, mode=mode)
    mean_square(model, batch()).backward()
    return seen


@pytest.mark.parametrize("shard", [shard_all, replicated])
def test_hooks_of_several_gradients_run_once_for_each_backward(shard):
    def run(mesh):
        model, seen = shard(made(), mesh), []
        handle = register_multi_grad_hook(list(model.parameters()), seen.append)
        for count in (1, 2):
            mean_square(model, mine(batch(), mesh)).backward()
            assert len(seen) == count
            model.zero_grad()
        for each in seen:
            for found, wanted in zip(each, in_one_process("all")[0], strict=True):
                assert_close(full(found), wanted)
        handle.remove()
        mean_square(model, mine(batch(), mesh)).backward()
        assert len(seen) == 2

    on_ranks(run)


def test_gradients_that_are_not_computed_are_none():
    def run(mesh):
        model, seen = shard_all(made(), mesh), []
        other = torch.ones(3, dtype=torch.float64, requires_grad=True)
        tensors = [model.head.weight, other, *model.layers[0].parameters()]
        register_multi_grad_hook(tensors, seen.append)
        mean_square(model, mine(batch(), mesh)).backward()
        (mean_square(model, mine(batch(), mesh)) + other.sum()).backward()
        other.sum().backward()
        assert [[each is not None for each in found][:2] for found in seen] == [
            [True, False],
            [True, True],
            [False, True],
        ]

    on_ranks(run)


def test_hooks_of_the_first_gradient():
    def run(mesh):
        model, seen = shard_all(made(), mesh), []
        register_multi_grad_hook(list(model.parameters()), seen.append, mode="any")
        mean_square(model, mine(batch(), mesh)).backward()
        assert len(seen) == 1

    on_ranks(run)


@pytest.mark.parametrize("shard", [shard_all, replicated])
def test_optimizers_in_backward_train_as_one_process(shard):
    def run(mesh):
        model = shard(made(), mesh)
        options = {"lr": 0.05}
        _apply_optimizer_in_backward(torch.optim.AdamW, list(model.parameters()), options)
        for _ in range(3):
            mean_square(model, mine(batch(), mesh)).backward()
            assert all(each.grad is None for each in model.parameters())
        wanted = train(made(), batch())
        wanted.zero_grad()
        assert_same(model, wanted)

    on_ranks(run)
