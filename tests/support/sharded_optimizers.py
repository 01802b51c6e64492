"""Ways to shard and train a model, for the tests of optimizers of sharded parameters."""

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_

from shardwise.sharded import (
    ShardedOptimizer,
    named_params_with_sharded_tensor,
)
from support.sharded_modules import (
    BAGS,
    CLASSES,
    HIDDEN,
    Recommender,
    in_order,
    permuted,
    whole,
)
from support.sharded_tensors import chunks
from support.sharded_tensors import cut as boxes

TARGETS = torch.tensor([0, 2, 1, 0])


def uneven(count):
    """Shard unevenly: several shards on a rank, none on another; a bias on two ranks."""
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
    """Return the loss; parameters whose shards are no layout are gathered first."""
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
