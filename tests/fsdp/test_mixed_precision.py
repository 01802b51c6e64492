"""Mixed precision is that of one process that rounds at the same places."""

import pytest
import torch
from support.fsdp_cases import full, hybrid, in_one, on_ranks, replicated
from support.fsdp_models import WAYS, Task
from support.fsdp_rounding import check_rounding
from torch import nn

from shardwise.fsdp import MixedPrecisionPolicy

HALF, SINGLE = torch.bfloat16, torch.float32


EVERY_WAY = pytest.mark.parametrize("way", WAYS)  # with everything else: tests/sweep


@EVERY_WAY
def test_parameters_are_rounded_once_and_gradients_where_they_are_reduced(way):
    check_rounding(WAYS[way], Task(SINGLE), HALF)


@EVERY_WAY
def test_gradients_of_tied_parameters_are_summed_before_they_are_reduced(way):
    check_rounding(WAYS[way], Task(SINGLE, tied=True, clip=0.1), SINGLE)


@EVERY_WAY
def test_gradients_are_reduced_in_the_dtype_of_the_parameters_by_default(way):
    """As in torch from 2.15 on, here with every torch; before, it was the dtype of computation."""
    check_rounding(WAYS[way], Task(SINGLE), None)


@pytest.mark.parametrize(
    ("way", "reduce_dtype", "sync"),
    [
        ("fsdp", HALF, "every"),
        ("fsdp", SINGLE, "last"),
        ("hsdp", HALF, "last"),
        ("hsdp", SINGLE, "every"),
        ("replicate", HALF, "last"),
        ("replicate", SINGLE, "last"),
        ("fsdp", None, "last"),
        ("hsdp", None, "last"),
    ],
)
def test_microbatches_accumulate_in_the_dtype_of_reductions(way, reduce_dtype, sync):
    check_rounding(WAYS[way], Task(SINGLE, steps=4), reduce_dtype, 3, sync)


@pytest.mark.parametrize("way", [in_one, hybrid, replicated])
def test_the_mean_of_halves_that_fit_does_not_overflow(way):
    """Though their sum would."""
    large = 40_000.0

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.layers = nn.ModuleList()

        def forward(self, x):
            return self.weight * x

    def run(mesh):
        policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
        model = way(Net(), mesh, mp_policy=policy)
        model(torch.full((2,), large)).sum().backward()
        return full(model.weight.grad).tolist()

    assert on_ranks(run, 4) == [[large, large]] * 4
