"""Recurrent networks: a batch is split, and nothing is sent for that."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.rules import heard, in_layout, leaf, ranks, values
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.testing import Sample, check_rule

# check_rule finds splits that are legal, and complains of those that communicate.
check = functools.partial(check_rule, mesh_shapes=((3,),), most=4)

STEPS, ROWS = leaf(2, 5, 3), leaf(5, 3)
STATE, MEMORY = leaf(1, 5, 4), leaf(1, 5, 4)


def weights(gates: int) -> list[torch.Tensor]:
    return [leaf(gates * 4, 3), leaf(gates * 4, 4), leaf(gates * 4), leaf(gates * 4)]


def options(dropout: float = 0.0, batch_first: bool = False) -> tuple[Any, ...]:
    return (True, 1, dropout, True, False, batch_first)


CALLS = {
    "lstm": (torch.lstm, Sample(STEPS, (STATE, MEMORY), weights(4), *options())),
    "gru": (torch.gru, Sample(STEPS, STATE, weights(3), *options())),
    "rnn": (
        torch.rnn_tanh,
        Sample(leaf(5, 2, 3), STATE, weights(1), *options(batch_first=True)),
    ),
    "lstm_cell": (torch.lstm_cell, Sample(ROWS, (leaf(5, 4), leaf(5, 4)), *weights(4))),
    "gru_cell": (torch.gru_cell, Sample(ROWS, leaf(5, 4), *weights(3))),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_batch_is_split(name: str) -> None:
    function, sample = CALLS[name]
    check(function, [sample])


def test_dropout_between_layers_is_the_same_on_all_layouts() -> None:
    def run(mesh: sw.DeviceMesh) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.GRU(3, 4, num_layers=2, dropout=0.5, batch_first=True).double()
        found = []
        for placement in (Replicate(), Shard(0), Shard(1)):
            torch.manual_seed(1)
            result, _ = model(in_layout(values(5, 2, 3), mesh, placement))
            found.append(result.full_tensor())
        return found

    made = [each for rank in ranks(run, 3) for each in rank]
    assert all(torch.equal(each, made[0]) for each in made)


def test_a_module_of_whole_weights_sends_nothing() -> None:
    def run(mesh: sw.DeviceMesh) -> tuple[Any, list[Any]]:
        model = sw.distribute_module(nn.LSTM(3, 4, bidirectional=True).double(), mesh)
        x = in_layout(values(2, 5, 3), mesh, Shard(1))
        events, (result, _) = heard(mesh, lambda: model(x))
        return result.placements, events

    for placements, events in ranks(run, 3):
        assert placements == (Shard(1),)
        assert not events
