"""Data-parallel training over real processes is that of one: a part of what is simulated."""

from collections.abc import Iterator

import pytest
import torch
from fsdp_memory import BLOCK, LAYERS, Counted, live_bytes
from fsdp_models import (
    FEATURES,
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
from fsdp_random import cases, compare_case, trained_in_process
from fsdp_rounding import rounding
from hypothesis import HealthCheck, given, settings

import shardwise as sw
from shardwise.fsdp import MixedPrecisionPolicy

FOUR = {
    **{name: way for name, way in WAYS.items() if way.ranks == 4},
    "fsdp": Way((4,), ("dp",), each_block),
    "replicate": Way((4,), ("dp",), as_one_whole),
}


@pytest.fixture(scope="module")
def workers2() -> Iterator[sw.Workers]:
    with sw.Workers(2, timeout=60) as workers:
        yield workers


def check(workers, way, task, variation):
    outcomes = workers.run(as_rank, way, task, variation)
    compare(outcomes, alone(task), TOLERANCES[task.dtype])


@pytest.mark.parametrize("way", FOUR)
@pytest.mark.parametrize("feature", ["nothing else", "all of it", "all of it, reentrant"])
def test_ten_steps_are_those_of_one_process(workers4, way, feature):
    fields, variation = FEATURES[feature]
    check(workers4, FOUR[way], Task(**fields), variation)


@pytest.mark.parametrize("way", FOUR)
def test_ten_steps_in_single_precision_are_those_of_one_process(workers4, way):
    fields, variation = FEATURES["all of it"]
    check(workers4, FOUR[way], Task(torch.float32, **fields), variation)


def test_gradients_of_microbatches_are_summed_over_shards_each_and_over_replicas_once(workers4):
    check(workers4, WAYS["hsdp"], Task(), Variation(3, "shards"))


@pytest.mark.parametrize("reshard", [None, 2])
def test_sizes_need_not_divide_and_pieces_may_be_empty(workers4, reshard):
    options = {"shard_placement_fn": columns, "reshard_after_forward": reshard}
    task = Task(sizes=(5, 7, 3), tied=True, clip=0.1)
    check(workers4, FOUR["fsdp"], task, Variation(options=options))


@pytest.mark.parametrize("way", ["fsdp", "replicate"])
@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32], ids=("bf16", "fp32"))
def test_mixed_precision_rounds_as_one_process_does(workers2, way, reduce_dtype):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    variation = Variation(3, "last", options={"mp_policy": policy})
    task = Task(torch.float32, tied=True)
    outcomes = workers2.run(as_rank, WAYS[way], task, variation)
    compare(outcomes, rounding(WAYS[way], task, variation), 1e-6)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(meshes=[(4,), (2, 2)]))
def test_a_random_model_sharded_at_random_trains_as_in_one_process(workers4, case):
    compare_case(workers4.run(trained_in_process, case), case)


def counted(reshard):
    before = live_bytes()
    model = Counted(sw.init_device_mesh("cpu", (2,), ("dp",)), reshard)
    found = []
    for _ in range(3):
        model.step()
        found.append(model.beside_shards(before, 1))
    return found, model.peak / BLOCK, model.context.pool.nbytes / BLOCK


@pytest.mark.parametrize(("reshard", "blocks"), [(True, 2), (False, LAYERS)])
def test_after_every_step_nothing_is_alive_but_shards_and_a_few_buffers(workers2, reshard, blocks):
    for found, peak, kept in workers2.run(counted, reshard):
        assert max(found) < 0.01
        assert blocks - 1 < peak < blocks + 0.2  # a block and the next
        assert kept < 4
