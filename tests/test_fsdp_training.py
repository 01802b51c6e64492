"""Data-parallel training is that of one process on the whole batch: on simulated ranks."""

import pytest
import torch
from fsdp_models import (
    FEATURES,
    WAYS,
    Task,
    Variation,
    Way,
    alone,
    as_one,
    as_one_whole,
    build,
    by_plan,
    by_styles,
    check,
    columns,
    each_block,
    loss_of,
    whole,
)

import shardwise as sw
from shardwise import DTensor, Replicate, Shard

EVERY_WAY = pytest.mark.parametrize("way", WAYS)


@EVERY_WAY
@pytest.mark.parametrize("feature", FEATURES)
def test_ten_steps_are_those_of_one_process(way, feature):
    fields, variation = FEATURES[feature]
    check(WAYS[way], Task(**fields), variation)


@EVERY_WAY
@pytest.mark.parametrize("feature", ["nothing else", "tied", "all of it"])  # the rest: tests/sweep
def test_ten_steps_in_single_precision_are_those_of_one_process(way, feature):
    fields, variation = FEATURES[feature]
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


def some_whole(parameter):
    return Replicate() if parameter.dim() == 1 else Shard(-1)


UNEVEN = {
    "fsdp 2": Way((2,), ("dp",), each_block),
    "fsdp 3": Way((3,), ("dp",), each_block),
    "fsdp 4": Way((4,), ("dp",), each_block),
    "hsdp 2x3": Way((2, 3), ("replicate", "shard"), each_block),
    "fsdp 2 x tp 2": Way((2, 2), ("dp", "tp"), each_block, by_plan),
    "fsdp 3 x tp 2": Way((3, 2), ("dp", "tp"), each_block, by_plan),
    "fsdp 2 x styles 2": Way((2, 2), ("dp", "tp"), each_block, by_styles),
    "replicate 3": Way((3,), ("dp",), as_one_whole),
}


@pytest.mark.parametrize("way", UNEVEN)
@pytest.mark.parametrize("placement", [None, columns, some_whole])
def test_sizes_need_not_divide_and_pieces_may_be_empty(way, placement):
    options = {} if placement is None or "replicate" in way else {"shard_placement_fn": placement}
    check(UNEVEN[way], Task(sizes=(5, 7, 3), tied=True, clip=0.1), Variation(options=options))


@pytest.mark.parametrize("placement", [None, columns])
def test_uneven_parameters_may_be_split_over_fewer_ranks_after_forward(placement):
    options = {"reshard_after_forward": 2, "shard_placement_fn": placement}
    check(UNEVEN["fsdp 4"], Task(sizes=(5, 7, 3), tied=True), Variation(options=options))


# ---- parts that are computed anew, and failures


@pytest.mark.parametrize("use_reentrant", [False, True], ids=("new", "reentrant"))
@pytest.mark.parametrize("reshard", [None, True, False])
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
