"""Mixed precision is that of one process that rounds at the same places."""

import pytest
import torch
from fsdp_models import WAYS, Task
from fsdp_rounding import check_rounding

HALF, SINGLE = torch.bfloat16, torch.float32


EVERY_WAY = pytest.mark.parametrize("way", WAYS)  # with everything else: tests/sweep


@EVERY_WAY
def test_parameters_are_rounded_once_and_gradients_where_they_are_reduced(way):
    check_rounding(WAYS[way], Task(SINGLE), HALF)


@EVERY_WAY
def test_gradients_of_tied_parameters_are_summed_before_they_are_reduced(way):
    check_rounding(WAYS[way], Task(SINGLE, tied=True, clip=0.1), SINGLE)


def test_gradients_are_reduced_in_the_dtype_of_computation_by_default():
    check_rounding(WAYS["fsdp"], Task(SINGLE), None)


@pytest.mark.parametrize(
    ("way", "reduce_dtype", "sync"),
    [
        ("fsdp", HALF, "every"),
        ("fsdp", SINGLE, "last"),
        ("hsdp", HALF, "last"),
        ("hsdp", SINGLE, "every"),
        ("replicate", HALF, "last"),
        ("replicate", SINGLE, "last"),
    ],
)
def test_microbatches_accumulate_in_the_dtype_of_reductions(way, reduce_dtype, sync):
    check_rounding(WAYS[way], Task(SINGLE, steps=4), reduce_dtype, 3, sync)
