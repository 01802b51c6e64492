"""Mixed precision is that of one process that rounds at the same places."""

import pytest
import torch
from fsdp_models import WAYS, Task, Variation, alone, as_rank, compare
from fsdp_rounding import rounding

import shardwise as sw
from shardwise.fsdp import MixedPrecisionPolicy

HALF, SINGLE = torch.bfloat16, torch.float32


EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def check_rounding(way, task, reduce_dtype, *variation):
    policy = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=reduce_dtype)
    variation = Variation(*variation, options={"mp_policy": policy})
    outcomes = sw.simulate(lambda: as_rank(way, task, variation), way.ranks)
    compare(outcomes, rounding(way, task, variation), 1e-6)
    with pytest.raises(AssertionError):  # or else nothing was rounded
        compare(outcomes, alone(task), 1e-3)


@EVERY_WAY
@pytest.mark.parametrize("reduce_dtype", [HALF, SINGLE], ids=("bf16", "fp32"))
def test_parameters_are_rounded_once_and_gradients_where_they_are_reduced(way, reduce_dtype):
    check_rounding(WAYS[way], Task(SINGLE), reduce_dtype)


@EVERY_WAY
def test_gradients_of_tied_parameters_are_summed_before_they_are_reduced(way):
    check_rounding(WAYS[way], Task(SINGLE, tied=True, clip=0.1), SINGLE)


def test_gradients_are_reduced_in_the_dtype_of_computation_by_default():
    check_rounding(WAYS["fsdp"], Task(SINGLE), None)


@pytest.mark.parametrize("way", ["fsdp", "hsdp", "replicate"])
@pytest.mark.parametrize("reduce_dtype", [HALF, SINGLE], ids=("bf16", "fp32"))
@pytest.mark.parametrize("sync", ["every", "last"])
def test_microbatches_accumulate_in_the_dtype_of_reductions(way, reduce_dtype, sync):
    check_rounding(WAYS[way], Task(SINGLE, steps=4), reduce_dtype, 3, sync)
