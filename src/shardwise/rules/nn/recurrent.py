"""Recurrent networks: nn.RNN, nn.GRU, nn.LSTM and their cells.

Only the batch may be split: every step combines all features of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from shardwise.dtensor.tensor import tensors_in
from shardwise.random.seed_check import check_plain_draws
from shardwise.rules.helpers.dims import unsplit_spec
from shardwise.rules.registry import rule
from shardwise.rules.spec import Out, Spec, SplitContext

Tensor = torch.Tensor
_STATE = (None, "batch", None)  # layers and directions, batch, width


def _layers(
    function: Callable[..., Any], input: Tensor, hx: Any, params: Any, *options: Any
) -> Spec | None:
    """Return the spec; options: has_biases, num_layers, dropout, train, bidirectional,
    batch_first."""
    if len(options) != 6 or input.dim() != 3:
        return None  # a packed sequence merges batch and steps in one dim
    _, _, dropout, train, is_bidirectional, batch_first = options
    states: list[Tensor] = list(tensors_in(hx))
    weights = list(tensors_in(params))
    width = states[0].shape[-1] * (2 if is_bidirectional else 1)
    shape = (*input.shape[:-1], width)
    if dropout and train:  # torch draws inside: all is whole, so all ranks draw the same
        whole = [input, *states, *weights]
        shapes = [shape, *(each.shape for each in states)]
        return unsplit_spec(whole, *shapes, lower=partial(_drawing, function))
    steps = ("batch", None, None) if batch_first else (None, "batch", None)
    return Spec(
        [(input, steps), *((each, _STATE) for each in states), *_whole(weights)],
        [Out(steps, shape), *(Out(_STATE, tuple(each.shape)) for each in states)],
    )


def _drawing(function: Callable[..., Any], context: SplitContext) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        check_plain_draws(context.mesh)
        return function(*args)

    return run


for _function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
    rule(_function.__name__, inplace=False)(partial(_layers, _function))


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", inplace=False)
def cell(input: Tensor, hx: Any, *weights: Any) -> Spec:
    states = list(tensors_in(hx))
    rows = ("batch", None)
    return Spec(
        [(input, rows), *((each, rows) for each in states), *_whole(list(tensors_in(weights)))],
        [Out(rows, tuple(each.shape)) for each in states],
    )


def _whole(weights: Sequence[Tensor]) -> list[Any]:
    return [(each, (None,) * each.dim()) for each in weights]
