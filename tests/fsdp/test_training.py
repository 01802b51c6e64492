"""Data-parallel training is that of one process on the whole batch: on simulated ranks."""

import pytest
import torch
from support.fsdp_models import (
    FEATURES,
    TOGETHER,
    UNEVEN,
    UNEVEN_SIZES,
    WAYS,
    Task,
    Variation,
    Way,
    alone,
    as_one,
    as_one_whole,
    build,
    check,
    columns,
    each_block,
    loss_of,
    some_whole,
    whole,
)

import shardwise as sw
from shardwise import DTensor

EVERY_WAY = pytest.mark.parametrize("way", WAYS)


@pytest.mark.sampled(every=2)
@EVERY_WAY
@pytest.mark.parametrize("features", TOGETHER)
def test_ten_steps_are_those_of_one_process(way, features):
    fields, variation = TOGETHER[features]
    check(WAYS[way], Task(**fields), variation)


@pytest.mark.sampled(every=3)
@EVERY_WAY
def test_ten_steps_in_single_precision_are_those_of_one_process(way):
    fields, variation = FEATURES["all of it, reentrant"]
    check(WAYS[way], Task(torch.float32, **fields), variation)


def test_the_table_of_features_has_what_it_says():
    plain = alone(Task())
    trained = {
        name: {key for key, each in alone(Task(**fields)).gradients.items() if each is not None}
        for name, (fields, _) in FEATURES.items()
    }
    assert trained["nothing else"] == set(plain.parameters)
    assert trained["tied"] == trained["nothing else"] - {"head.weight"}
    assert trained["biases trained"] == {key for key in plain.parameters if key.endswith("bias")}
    assert {key.split(".")[1] for key in trained["layers frozen"] if "blocks" in key} == {"1"}
    assert len(trained["some frozen"]) == len(plain.parameters) - 3
    assert min(alone(Task(clip=0.1)).norms) > 0.1  # every step is clipped


def test_gradients_of_microbatches_are_summed_over_shards_each_and_over_replicas_once():
    check(WAYS["hsdp"], Task(), Variation(microbatches=3, sync="shards"))


# ---- uneven sizes


@pytest.mark.parametrize(
    ("way", "placement"),
    [
        ("fsdp 2", None),
        ("fsdp 3", some_whole),
        ("fsdp 4", columns),
        ("hsdp 2x2", columns),
        ("fsdp 2 x tp 2", None),
        ("fsdp 2 x tp 2", columns),
        ("fsdp 2 x styles 2", some_whole),
    ],
)  # every pair: tests/sweep
def test_sizes_need_not_divide_and_pieces_may_be_empty(way, placement):
    task = Task(sizes=UNEVEN_SIZES, tied=True, clip=0.1)
    check(UNEVEN[way], task, Variation(options={"shard_placement_fn": placement}))


def test_sizes_need_not_divide_to_be_replicated():
    way = Way((3,), ("dp",), as_one_whole)
    check(way, Task(sizes=UNEVEN_SIZES, tied=True, clip=0.1))


def test_uneven_parameters_may_be_split_over_fewer_ranks_after_forward():
    options = {"reshard_after_forward": 2, "shard_placement_fn": columns}
    check(UNEVEN["fsdp 4"], Task(sizes=UNEVEN_SIZES, tied=True), Variation(options=options))


# ---- parts that are computed anew, and failures


@pytest.mark.parametrize(
    ("use_reentrant", "reshard"), [(False, True), (True, True), (True, None), (False, False)]
)
def test_parts_of_a_sharded_module_may_be_checkpointed(use_reentrant, reshard):
    variation = Variation(checkpointed=use_reentrant, options={"reshard_after_forward": reshard})
    check(Way((2,), ("dp",), as_one), Task(), variation)


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
