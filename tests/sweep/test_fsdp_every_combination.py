"""Every pair of FSDP options that tests/fsdp tests one by one. For `make sweep`."""

import pytest
import torch
from support.fsdp_models import (
    FEATURES,
    UNEVEN,
    UNEVEN_SIZES,
    WAYS,
    Task,
    Variation,
    check,
    columns,
    some_whole,
)
from support.fsdp_rounding import check_rounding

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=("fp32", "fp64"))
def test_ten_steps_are_those_of_one_process(way, feature, dtype):
    fields, variation = FEATURES[feature]
    check(WAYS[way], Task(dtype, **fields), variation)


@pytest.mark.parametrize("way", UNEVEN)
@pytest.mark.parametrize("placement", [None, columns, some_whole])
def test_sizes_need_not_divide_and_pieces_may_be_empty(way, placement):
    task = Task(sizes=UNEVEN_SIZES, tied=True, clip=0.1)
    check(UNEVEN[way], task, Variation(options={"shard_placement_fn": placement}))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduce_dtype", [HALF, SINGLE], ids=("bf16", "fp32"))
@pytest.mark.parametrize("tied", [False, True], ids=("apart", "tied"))
@pytest.mark.parametrize(("microbatches", "sync"), [(1, "every"), (3, "every"), (3, "last")])
def test_mixed_precision_rounds_as_one_process_does(way, reduce_dtype, tied, microbatches, sync):
    task = Task(SINGLE, tied=tied, clip=0.1, steps=4)
    check_rounding(WAYS[way], task, reduce_dtype, microbatches, sync)
