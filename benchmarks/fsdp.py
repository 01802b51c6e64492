"""Data parallelism: a training step of ours beside those of torch's DDP and FSDP2.

Two gloo ranks of one thread each, float32, the same weights, each rank with its half of a batch. In
the same processes, taking turns:

- alone: no communication, each rank trains its own model;
- DDP and FSDP2: torch's `DistributedDataParallel` and `fully_shard`, of each layer and of the root;
- ours: `fully_shard` of the same modules, and `replicate` of the model.

FSDP2 and ours reshard parameters after forward by their own defaults: torch's in all layers, ours
in all layers except those that backward begins with. "True" reshards all layers, "kept" none. All
but the first must have the losses of one process that trains on the whole batch. A step is forward,
backward and SGD, and its time is that of the slower rank.

Memory is the peak of all CPU tensors in a step, on the rank that needs more (`benchmarks._memory`),
with a new model for each way. With one token per rank there are hardly any activations, so the
peak consists of parameters, gradients and buffers.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from benchmarks._memory import check_measure, peak_of
from benchmarks._transformer import Model, Size
from benchmarks._turns import taking_turns, without_patches

SIZES = (
    Size("small", width=64, heads=2, hidden=176, batch=8, length=64, layers=8),
    Size("medium", width=256, heads=8, hidden=704, batch=8, length=64),
    Size("large", width=768, heads=24, hidden=2048, batch=8, length=64),
)
ROUNDS = 60
SECONDS = {"small": 10, "medium": 16, "large": 36}
"""Time limit for all rounds of one size; a busy machine gets through fewer rounds."""
GOAL_DDP = 1.2
GOAL_FSDP2 = 0.75
GOAL_MEMORY = 1.0
GOAL_REPLICATE = 1.0
EXACT = 0.01
"""If a larger part of a measured peak is in doubt, the peak is measured again."""
ATTEMPTS = 3
SETTLED = 2
"""Steps before the measured one: DDP rebuilds its buckets in its second step."""
CHECKED_STEPS = 3
TOLERANCE = 1e-5

Data = tuple[torch.Tensor, torch.Tensor]


# ---- the ways


def alone(model: Model) -> nn.Module:
    """Train each rank by itself, without communication."""
    return model


def ddp(model: Model) -> nn.Module:
    """torch's `DistributedDataParallel`."""
    return nn.parallel.DistributedDataParallel(model)


def fsdp2(model: Model, reshard: bool | None = None) -> nn.Module:
    """torch's `fully_shard`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return _sharded(model, fully_shard, init_device_mesh("cpu", (2,)), reshard)


def ours(model: Model, reshard: bool | None = None) -> nn.Module:
    """Our `fully_shard`."""
    return _sharded(model, sw.fsdp.fully_shard, sw.init_device_mesh("cpu", (2,)), reshard)


def _sharded(model: Model, fully_shard: Any, mesh: Any, reshard: bool | None) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh)


def replicated(model: Model) -> nn.Module:
    """Our `replicate`."""
    return sw.fsdp.replicate(model)


WAYS: dict[str, Callable[[Model], nn.Module]] = {
    "alone": alone,
    "DDP": ddp,
    "FSDP2": fsdp2,
    "FSDP2, kept": lambda model: fsdp2(model, reshard=False),
    "ours": ours,
    "ours, True": lambda model: ours(model, reshard=True),
    "ours, kept": lambda model: ours(model, reshard=False),
    "replicate": replicated,
}
OURS = {"ours": "FSDP2", "ours, True": "FSDP2", "ours, kept": "FSDP2, kept", "replicate": None}
"""Our implementations, each with its goal relative to DDP."""


# ---- on every rank


class Step:
    """Return a training step."""

    def __init__(self, model: nn.Module, data: Data) -> None:
        self.model, self.data = model, data
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)

    def __call__(self) -> torch.Tensor:
        loss = self.model(*self.data)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def measure(size: Size) -> dict[str, Any]:
    """Return the times of all implementations, in alternation, and their peak memory, with and
    without activations."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model(size)
    whole = Model.data(size)
    half = _half(whole)
    token = _half(Model.data(replace(size, batch=2, length=1)))
    steps = {name: Step(way(deepcopy(model)), half) for name, way in WAYS.items()}
    _check_losses(Step(deepcopy(model), whole), steps)
    times = taking_turns(steps, OURS, ROUNDS, SECONDS[size.name])
    steps.clear()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    peaks = {name: _peak(name, model, token, half) for name in WAYS}
    least = {name: _peak(name, model, token, token) for name in WAYS}
    _check_memory(least["alone"], 2 * nbytes)
    return {"times": times, "peaks": peaks, "least": least, "nbytes": nbytes}


def _half(data: Data) -> Data:
    """Return this rank's part of the data."""
    tokens, targets = (each.chunk(2)[dist.get_rank()].contiguous() for each in data)
    return tokens, targets


def _check_losses(one: Step, steps: dict[str, Step]) -> None:
    """Check that all implementations have the losses of one process on the whole batch."""
    expected = torch.stack([one() for _ in range(CHECKED_STEPS)])
    for name, step in steps.items():
        with nullcontext() if name in OURS else without_patches():
            losses = torch.stack([step() for _ in range(CHECKED_STEPS)])
        dist.all_reduce(losses)
        if name != "alone":
            torch.testing.assert_close(
                losses / 2,
                expected,
                rtol=TOLERANCE,
                atol=0,
                msg=lambda text, name=name: f"the losses of {name}: {text}",
            )


def _peak(name: str, model: Model, token: Data, data: Data) -> int:
    """Return the peak memory of an implementation, on the rank that needs more."""

    def make() -> Step:
        step = Step(WAYS[name](deepcopy(model)), token)
        for _ in range(SETTLED):
            step()
        step.data = data
        return step

    peaks = []
    for _ in range(ATTEMPTS):
        with nullcontext() if name in OURS else without_patches():
            found = torch.tensor(peak_of(make))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        peak, lost = found.tolist()
        peaks.append(peak)
        if lost < EXACT * peak:
            break
    return min(peaks)


def _check_memory(found: int, expected: int) -> None:
    """Check the measurement: without communication and activations, the peak is that of parameters
    and gradients."""
    if not expected <= found <= 1.03 * expected:
        raise AssertionError(
            f"the peak is {expected} bytes of parameters and gradients, and {found} were measured"
        )


# ---- the table


def main() -> None:
    """Measure, and print the tables."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it logs every start and stop
    with sw.Workers(2) as workers:
        workers.run(check_measure)
        for size in SIZES:
            _print(size, workers.run(measure, size)[0])


def _print(size: Size, found: dict[str, Any]) -> None:
    print(
        f"\n{size.layers} layers of width {size.width}, {_megabytes(found['nbytes'])} MB of "
        f"parameters, {size.batch // 2} x {size.length} tokens for each of 2 gloo ranks, "
        f"{len(found['times']['alone'])} rounds"
    )
    print(f"  {'':12}{'ms: min (median)':>18}{'peak MB':>10}{'1 token':>9}")
    for name, times in found["times"].items():
        shown = f"{min(times) * 1e3:.2f} ({statistics.median(times) * 1e3:.2f})"
        peak, least = _megabytes(found["peaks"][name]), _megabytes(found["least"][name])
        print(f"  {name:12}{shown:>18}{peak:>10}{least:>9}{_verdicts(name, found)}", flush=True)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f}"


def _verdicts(name: str, found: dict[str, Any]) -> str:
    """Print the ratios to torch's implementations, with their goals."""
    if name not in OURS:
        return ""
    time = {way: min(times) for way, times in found["times"].items()}
    other = OURS[name]
    if other is None:
        return _verdict("time", time, name, "DDP", GOAL_REPLICATE)
    return (
        _verdict("time", time, name, "DDP", GOAL_DDP)
        + _verdict("time", time, name, other, GOAL_FSDP2)
        + _verdict("memory", found["peaks"], name, other, GOAL_MEMORY)
        + _verdict("1 token", found["least"], name, other, GOAL_MEMORY)
    )


def _verdict(what: str, values: dict[str, float], name: str, other: str, goal: float) -> str:
    ratio = values[name] / values[other]
    return f"  {what} {ratio:.2f} of {other} ({'met' if ratio <= goal else 'MISSED'}: {goal})"


if __name__ == "__main__":
    main()
