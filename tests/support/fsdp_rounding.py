"""Mixed precision in one process: the computation of each rank in turn, with its roundings."""

import math

import pytest
import torch
from torch.func import functional_call

import shardwise as sw
from shardwise.fsdp import MixedPrecisionPolicy
from support.fsdp_models import Variation, alone, as_rank, build, compare, loss_of, stepped


def check_rounding(way, task, reduce_dtype, *variation):
    """Check that simulated ranks in bfloat16 train as one process that rounds alike."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    variation = Variation(*variation, options={"mp_policy": policy})
    outcomes = sw.simulate(lambda: as_rank(way, task, variation), way.ranks)
    compare(outcomes, rounding(way, task, variation), 1e-6)
    with pytest.raises(AssertionError):  # or else nothing was rounded
        compare(outcomes, alone(task), 1e-4)


def rounding(way, task, variation):
    """Train in one process, which computes the part of each rank in turn.

    With tensor parallelism it computes the parts of as many ranks as that needs.
    """
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
    reduce_dtype = policy.reduce_dtype or task.dtype
    parts = math.prod(way.data_shape)

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
            gradient = reduced([each[name] for each in found], way.data_shape).to(parameter.dtype)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    return stepped(model, task, accumulate)


def reduced(gradients, shape):
    """Sum halves in single precision, divide and round; over the last axis first."""
    dtype = gradients[0].dtype
    for size in reversed(shape):
        gradients = [
            (sum(each.float() for each in gradients[start : start + size]) / size).to(dtype)
            for start in range(0, len(gradients), size)
        ]
    (result,) = gradients
    return result
