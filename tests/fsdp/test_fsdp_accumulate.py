"""sw.accumulate() around fully sharded and replicated modules: one reduction for all micro-batches,
as with `set_requires_gradient_sync(False)` for all but the last."""

import pytest
import torch
from support.fsdp_cases import (
    WIDTH,
    Net,
    assert_at_rest,
    assert_close,
    assert_same,
    batch,
    made,
    mean_square,
    mine,
    on_ranks,
    shard_all,
)
from support.rules import heard
from torch import nn

import shardwise as sw
from shardwise import Shard
from shardwise.core.mesh import init_device_mesh
from shardwise.fsdp import MixedPrecisionPolicy, fully_shard, replicate
from shardwise.parallel import shard_module

PARTS = 3


def parts():
    return [batch(seed=seed) for seed in range(PARTS)]


def in_one_process(count=PARTS):
    model = made()
    for x in parts()[:count]:
        (mean_square(model, x) / PARTS).backward()
    return model


def backward(model, x):
    (mean_square(model, x) / PARTS).backward()


def sharded(mesh):
    return shard_all(made(), mesh)


def hybrid(mesh):
    pairs = init_device_mesh("cpu", (2, mesh.size() // 2), ("replicate", "shard"))
    return shard_all(made(), pairs)


def replicated(mesh):
    return replicate(made(), mesh=mesh)


WAYS = [sharded, hybrid, replicated]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_one_process(way, count):
    def run(mesh):
        model = way(mesh)
        for _ in range(2):
            with sw.accumulate():
                for x in parts():
                    backward(model, mine(x, mesh))
            assert_same(model, in_one_process())
            assert_at_rest(model)
            model.zero_grad()

    on_ranks(run, count)


def reductions_in(events):
    return [(each.kind, each.shape) for each in events if each.cause.operator == "reduce_gradients"]


@pytest.mark.parametrize("way", WAYS)
def test_the_reductions_of_k_micro_batches_are_those_of_one(way):
    def run(mesh):
        model = way(mesh)
        one, _ = heard(mesh, lambda: backward(model, mine(batch(), mesh)))

        def several():
            with sw.accumulate():
                for x in parts():
                    backward(model, mine(x, mesh))

        again, _ = heard(mesh, several)
        assert reductions_in(one) and reductions_in(again) == reductions_in(one)

    on_ranks(run)


@pytest.mark.parametrize("way", WAYS)
def test_reading_a_gradient_completes_it(way):
    def run(mesh):
        model = way(mesh)
        with sw.accumulate():
            backward(model, mine(parts()[0], mesh))
            assert_same(model, in_one_process(1))
            backward(model, mine(parts()[1], mesh))
            ours = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            theirs = torch.nn.utils.clip_grad_norm_(in_one_process(2).parameters(), 1e6)
            assert_close(ours.full_tensor(), theirs)
            backward(model, mine(parts()[2], mesh))
        assert_same(model, in_one_process())

    on_ranks(run)


def test_an_exception_drops_what_was_put_off():
    def run(mesh):
        model = sharded(mesh)

        def fail():
            with sw.accumulate():
                backward(model, mine(parts()[0], mesh))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert all(each.grad is None for each in model.parameters())
        assert_at_rest(model)
        with sw.accumulate():
            for x in parts():
                backward(model, mine(x, mesh))
        assert_same(model, in_one_process())

    on_ranks(run)


def test_it_respects_set_requires_gradient_sync():
    def run(mesh):
        model = sharded(mesh)
        model.set_requires_gradient_sync(False)
        with sw.accumulate():
            backward(model, mine(parts()[0], mesh))
        assert all(each.grad is None for each in model.parameters())
        with sw.accumulate():
            backward(model, mine(parts()[1], mesh))
            model.set_requires_gradient_sync(True)
            backward(model, mine(parts()[2], mesh))
        assert_same(model, in_one_process())

    on_ranks(run)


def test_mixed_precision_accumulates_in_the_dtype_of_reductions():
    def run(mesh):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        found = []
        for accumulates in (False, True):
            torch.manual_seed(0)
            model = shard_all(Net(), mesh, mp_policy=policy)
            if accumulates:
                with sw.accumulate():
                    for x in parts():
                        mean_square(model, mine(x, mesh).float()).backward()
            else:
                model.set_requires_gradient_sync(False)
                for x in parts():
                    model.set_requires_gradient_sync(x is parts()[-1])
                    mean_square(model, mine(x, mesh).float()).backward()
                model.set_requires_gradient_sync(True)
                model.set_manual_backward_finalization(True)
                model.finalize_backward()
            found.append([each.grad.full_tensor() for each in model.parameters()])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)

    on_ranks(run)


def test_beside_tensor_parallelism_gradients_are_those_of_one_process():
    """Data-parallel reductions are put off; tensor-parallel ones of gathered parameters are not."""

    def run():
        mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        model = made()
        shard_module(model, mesh["tp"], {"layers.*.linear.*": {"tp": Shard(0)}})
        shard_all(model, mesh["dp"])
        with sw.accumulate():
            for x in parts():
                own = x.chunk(2)[mesh["dp"].get_local_rank()]
                backward(model, sw.distribute_tensor(own, mesh["tp"], [sw.Replicate()]))
        assert_same(model, in_one_process())

    sw.simulate(run, 4)


def test_several_models_accumulate_in_one_context():
    def run(mesh):
        models = [sharded(mesh), nn.Linear(WIDTH, 2).double()]
        torch.nn.init.ones_(models[1].weight)
        fully_shard(models[1], mesh=mesh)
        with sw.accumulate():
            for x in parts():
                backward(models[0], mine(x, mesh))
                backward(models[1], mine(x, mesh))
        assert_same(models[0], in_one_process())
        assert models[1].weight.grad is not None

    on_ranks(run)
