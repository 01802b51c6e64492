"""Data-parallel training over real processes is that of one: a part of what is simulated."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from support.fsdp_memory import BLOCK, LAYERS, Counted, live_bytes
from support.fsdp_models import (
    FEATURES,
    PLAIN,
    TOLERANCES,
    WAYS,
    Task,
    Variation,
    Way,
    alone,
    as_one_whole,
    as_rank,
    columns,
    compare,
    each_block,
)
from support.fsdp_random import cases, compare_case, trained_in_process
from support.fsdp_rounding import rounding

import shardwise as sw
from shardwise.fsdp import MixedPrecisionPolicy

FOUR = {
    "fsdp": Way((4,), ("dp",), each_block),
    "hsdp": WAYS["hsdp"],
    "fsdp x tp": WAYS["fsdp x tp"],
    "replicate": Way((4,), ("dp",), as_one_whole),
}


def not_at_all(model, mesh):
    pass


TWICE_TWO = {  # two pairs of ranks do the same: the sum of two is the same in whichever order
    "fsdp": Way((2, 2), ("dp", "tp"), each_block, not_at_all),
    "replicate": Way((2, 2), ("dp", "tp"), as_one_whole, not_at_all),
}


def check(workers, way, task, variation):
    outcomes = workers.run(as_rank, way, task, variation)
    compare(outcomes, alone(task), TOLERANCES[task.dtype])


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("way", FOUR)
def test_ten_steps_are_those_of_one_process(workers4, way):
    fields, variation = FEATURES["all of it"]
    check(workers4, FOUR[way], Task(**fields), variation)


@pytest.mark.slow
@pytest.mark.parametrize("way", FOUR)
def test_ten_steps_in_single_precision_are_those_of_one_process(workers4, way):
    fields, variation = FEATURES["all of it, reentrant"]
    check(workers4, FOUR[way], Task(torch.float32, **fields), variation)


def test_ten_steps_without_more_where_some_parameters_are_not_tensor_parallel(workers4):
    check(workers4, WAYS["fsdp x styles"], Task(), PLAIN)


def test_gradients_of_microbatches_are_summed_over_shards_each_and_over_replicas_once(workers4):
    check(workers4, WAYS["hsdp"], Task(), Variation(3, "shards"))


@pytest.mark.parametrize("reshard", [None, 2])
def test_sizes_need_not_divide_and_pieces_may_be_empty(workers4, reshard):
    options = {"shard_placement_fn": columns, "reshard_after_forward": reshard}
    task = Task(sizes=(5, 7, 3), tied=True, clip=0.1)
    check(workers4, FOUR["fsdp"], task, Variation(options=options))


@pytest.mark.parametrize(
    ("way", "reduce_dtype"), [("fsdp", torch.bfloat16), ("replicate", torch.float32)]
)
def test_mixed_precision_rounds_as_one_process_does(workers4, way, reduce_dtype):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    variation = Variation(3, "last", options={"mp_policy": policy})
    task = Task(torch.float32, tied=True, steps=4)
    outcomes = workers4.run(as_rank, TWICE_TWO[way], task, variation)
    # in a worker too: with another number of threads sums are rounded otherwise
    expected = workers4.run(rounding, TWICE_TWO[way], task, variation)[0]
    compare(outcomes, expected, 1e-6)


@pytest.mark.slow
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(meshes=[(4,), (2, 2)]))
def test_a_random_model_sharded_at_random_trains_as_in_one_process(workers4, case):
    compare_case(workers4.run(trained_in_process, case), case)


def counted(reshard):
    before = live_bytes()
    model = Counted(sw.init_device_mesh("cpu", (2, 2), ("other", "dp"))["dp"], reshard)
    found = []
    for _ in range(2):
        model.step()
        found.append(model.beside_shards(before, 1))
    return found, model.peak / BLOCK, model.unit_set.pool.nbytes / BLOCK


@pytest.mark.slow
@pytest.mark.parametrize(("reshard", "blocks"), [(True, 2), (False, LAYERS)])
def test_after_every_step_nothing_is_alive_but_shards_and_a_few_buffers(workers4, reshard, blocks):
    for found, peak, kept in workers4.run(counted, reshard):
        assert max(found) < 0.01
        assert blocks - 1 < peak < blocks + 0.2  # a block and the next
        assert kept < 4
