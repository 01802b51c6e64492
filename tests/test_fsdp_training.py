"""Data-parallel training is that of one process on the whole batch: on simulated ranks."""

import pytest
import torch
from fsdp_models import (
    PLAIN,
    WAYS,
    Task,
    Variation,
    Way,
    alone,
    as_one,
    as_rank,
    build,
    compare,
    each_block,
    loss_of,
    whole,
)

import shardwise as sw
from shardwise import DTensor

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
EVERY_WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
BOTH_DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=("fp64", "fp32"))


def check(way, task, variation=PLAIN):
    outcomes = sw.simulate(lambda: as_rank(way, task, variation), way.ranks)
    compare(outcomes, alone(task), TOLERANCES[task.dtype])


@BOTH_DTYPES
@EVERY_WAY
@pytest.mark.parametrize("tied", [False, True], ids=("apart", "tied"))
def test_ten_steps_are_those_of_one_process(way, dtype, tied):
    check(way, Task(dtype, tied=tied))


@BOTH_DTYPES
@EVERY_WAY
@pytest.mark.parametrize("frozen", ["some", "whole layers", "all but biases"])
def test_frozen_parameters_stay_and_the_rest_is_trained(way, dtype, frozen):
    check(way, Task(dtype, frozen=frozen))


@BOTH_DTYPES
@EVERY_WAY
@pytest.mark.parametrize("sync", ["every", "last"])
def test_gradients_of_three_microbatches_accumulate(way, dtype, sync):
    check(way, Task(dtype), Variation(microbatches=3, sync=sync))


@BOTH_DTYPES
@EVERY_WAY
@pytest.mark.parametrize("use_reentrant", [False, True], ids=("new", "reentrant"))
@pytest.mark.parametrize("regions", [(1, 1, 1), (2, 1)], ids=("each", "two"))
def test_checkpointed_blocks_are_computed_anew_with_parameters_gathered_again(
    way, dtype, use_reentrant, regions
):
    check(way, Task(dtype), Variation(regions=regions, checkpointed=use_reentrant))


@BOTH_DTYPES
@EVERY_WAY
def test_gradients_are_clipped_by_the_norm_of_all(way, dtype):
    task = Task(dtype, clip=0.1)
    check(way, task)
    assert min(alone(task).norms) > 0.1  # all of them were


@pytest.mark.parametrize("use_reentrant", [False, True], ids=("new", "reentrant"))
@pytest.mark.parametrize("reshard", [None, True, False])
def test_parts_of_a_sharded_module_may_be_checkpointed(use_reentrant, reshard):
    variation = Variation(checkpointed=use_reentrant, options={"reshard_after_forward": reshard})
    check(Way((2,), ("dp",), as_one, 2), Task(), variation)


@pytest.mark.parametrize("prepare", [each_block, as_one])
def test_after_a_backward_that_failed_modules_have_their_shards_and_training_goes_on(prepare):
    task = Task(steps=2)

    def fail(gradient):
        raise ZeroDivisionError

    def run():
        mesh = sw.init_device_mesh("cpu", (2,), ("dp",))
        model, batches = build(task)
        prepare(model, mesh)
        first, second = (batch.chunk(2)[mesh.get_rank()] for batch in batches)
        watch = model.blocks[1].register_forward_hook(
            lambda module, args, output: output.register_hook(fail) and None
        )
        with pytest.raises(ZeroDivisionError):
            loss_of(model, first).backward()
        watch.remove()
        assert all(isinstance(each, DTensor) for each in model.parameters())
        model.zero_grad()
        loss_of(model, second).backward()
        return [whole(each.grad) for each in model.parameters()]

    plain, batches = build(task)
    loss_of(plain, batches[1]).backward()
    for gradients in sw.simulate(run, 2):
        for ours, theirs in zip(gradients, plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.grad, rtol=1e-10, atol=1e-10)
