"""A small model, and ways to shard it, for the tests of modules with sharded parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.sharded import (
    ShardedTensor,
    ShardedTensorError,
    ShardingPlan,
    ShardingSpec,
    shard_module,
)
from support.sharded_tensors import chunks

ROWS, WIDTH, HIDDEN, CLASSES = 11, 5, 7, 3  # nothing divides


class Recommender(nn.Module):
    """An embedding bag and two layers, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"dtype": torch.float64}
        self.table = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", **options)
        self.fc1 = nn.Linear(WIDTH, HIDDEN, **options)
        self.fc2 = nn.Linear(HIDDEN, CLASSES, **options)

    def forward(self, bags: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.tanh(self.fc1(self.table(bags))))


BAGS = torch.tensor([[0, 3, 10], [2, 2, 7], [9, 1, 4], [5, 6, 8]])


def cut(model: nn.Module, specs: dict[str, ShardingSpec]) -> Any:
    """Return a model with these parameters sharded."""
    shard_module(model, ShardingPlan(dict(specs)))
    return model


def whole(tensor: Any) -> Any:
    """Return a tensor gathered on every rank."""
    return tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor


def refused_on_all(run, count=2):
    """Return the message of the error that every rank raises."""

    def caught():
        with pytest.raises(ShardedTensorError) as error:
            run()
        return str(error.value)

    return sw.simulate(caught, count)[0]


def in_order(count: int) -> dict[str, ShardingSpec]:
    """Shard the model over ranks in order: rows of the table, hidden units."""
    ranks = range(count)
    return {
        "table.weight": chunks(0, *ranks),
        "fc1.weight": chunks(0, *ranks),
        "fc1.bias": chunks(0, *ranks),
        "fc2.weight": chunks(-1, *ranks),
    }


def permuted(count: int) -> dict[str, ShardingSpec]:
    """Shard over ranks in another order, and the columns of the table."""
    ranks = [*range(1, count), 0]
    return {"table.weight": chunks(1, *ranks), "fc1.weight": chunks(1, *ranks)}


CUTS = {"in order": in_order, "permuted": permuted}
