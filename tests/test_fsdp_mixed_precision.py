"""Mixed precision is that of one process that rounds at the same places."""

import pytest
import torch
from fsdp_models import WAYS, Task, Variation, alone, as_rank, build, compare, loss_of, stepped
from torch.func import functional_call

import shardwise as sw
from shardwise.fsdp import MixedPrecisionPolicy

HALF, SINGLE = torch.bfloat16, torch.float32


def rounding(way, task, variation):
    """One process, which computes what each rank does one after the other; with tensor parallelism
    as many as that needs."""
    if way.lay_out is None:
        return rounded(way, task, variation, None)
    return sw.simulate(
        lambda: rounded(way, task, variation, sw.init_device_mesh("cpu", (2,), ("tp",))), 2
    )[0]


def rounded(way, task, variation, mesh):
    model, batches = build(task)
    if mesh is not None:
        way.lay_out(model, mesh)
    policy = variation.options["mp_policy"]
    reduce_dtype = policy.reduce_dtype or policy.param_dtype
    parts = torch.Size(way.data_shape).numel()

    def gradients_of(part):
        copies = {
            name: each.detach().to(policy.param_dtype).requires_grad_(each.requires_grad)
            for name, each in model.named_parameters()
        }
        loss = loss_of(lambda tokens: functional_call(model, copies, tokens), part)
        loss = loss / variation.microbatches
        loss.backward()
        return loss.item() / parts, {name: copies[name].grad for name in copies}

    def accumulate(step):
        total = 0.0
        kept = None
        for microbatch in batches[step].chunk(variation.microbatches):
            losses, found = zip(*map(gradients_of, microbatch.chunk(parts)), strict=True)
            total += sum(losses)
            found = [{name: each[name].to(reduce_dtype) for name in each} for each in found]
            if variation.sync == "every":
                hand_over(found)
            elif kept is None:
                kept = found
            else:
                for mine, more in zip(kept, found, strict=True):
                    for name in mine:
                        mine[name] += more[name]
        if kept is not None:
            hand_over(kept)
        return total

    def hand_over(found):
        for name, parameter in model.named_parameters():
            gradient = reduced([each[name] for each in found], way.data_shape).to(SINGLE)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    return stepped(model, task, accumulate)


def reduced(gradients, shape):
    """Halves are summed in single precision, divided and rounded; along the last axis first."""
    dtype = gradients[0].dtype
    for size in reversed(shape):
        gradients = [
            (sum(each.float() for each in gradients[start : start + size]) / size).to(dtype)
            for start in range(0, len(gradients), size)
        ]
    (result,) = gradients
    return result


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
