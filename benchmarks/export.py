"""Exported programs: a transformed program beside one written by hand, eager code, and torch's.

Two gloo ranks of one thread each, float32, the same weights, without gradients. In the same
processes, taking turns:

- ours: `shard_program` of the exported model, with a plan;
- by hand: local layers and `_c10d_functional` collectives, written as a module and exported;
- both compiled with the backend aot_eager;
- eager: our `shard_module` (plan) and `parallelize_module` (styles);
- torch: `tensor_parallel_transformation`, for an MLP of 2-d inputs, which is what it can do.

All must give one process's result. A call's time is that of the slower rank. Then the time to
transform: also a Llama of 32 layers without data, at fixed and at dynamic sizes, by one process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.export import Dim, ExportedProgram, export

import shardwise as sw
from benchmarks._transformer import SIZES, Attention, FeedForward, Model, Size
from benchmarks._turns import taking_turns
from benchmarks.tensor_parallel import with_plan, with_styles
from shardwise.examples.llama import Config, Llama
from shardwise.export import shard_program

ROUNDS = {"small": 100, "large": 12}
GOAL = 1.05
"""Goal: the time of our program, relative to the one written by hand."""
GOAL_SECONDS = 60
"""Goal: seconds to transform a Llama of 32 layers."""
TOLERANCE = 1e-4

COLUMNS, ROWS = {"tp": sw.Shard(0)}, {"tp": sw.Shard(1)}
PLAN = {
    "layers.*.attention.w[qkv].weight": COLUMNS,
    "layers.*.attention.wo.weight": ROWS,
    "layers.*.feed_forward.w[13].weight": COLUMNS,
    "layers.*.feed_forward.w2.weight": ROWS,
}
MLP_PLAN = {"up.*": COLUMNS, "down.weight": ROWS}
OURS = ("eager plan", "eager styles")
"""The implementations that need shardwise at run time."""

Call = Callable[[], torch.Tensor]


class Mlp(nn.Module):
    """Two linear layers with biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


# ---- by hand


def _summed(x: torch.Tensor) -> torch.Tensor:
    functional: Any = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD.group_name))


class _Attention(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _summed(super().forward(x))


class _FeedForward(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _summed(super().forward(x))


class _Mlp(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = torch.nn.functional.linear(self.up(x).relu(), self.down.weight)
        return _summed(partial) + self.down.bias


BY_HAND = {Attention: _Attention, FeedForward: _FeedForward, Mlp: _Mlp}
SPLIT_DIMS = {"wo.weight": 1, "w2.weight": 1, "down.weight": 1, "down.bias": None}
"""The split dim of each parameter that is not split along its first."""


def by_hand(model: nn.Module) -> nn.Module:
    """Make a model of local layers, with collectives after attention and feed-forward."""
    for part in model.modules():
        if type(part) not in BY_HAND:
            continue
        part.__class__ = BY_HAND[type(part)]
        for name, parameter in part.named_parameters():
            dim = SPLIT_DIMS.get(name, 0)
            if dim is not None:
                mine = parameter.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()]
                parameter.data = mine.contiguous()
    return model


# ---- on every rank


def measure_model(size: Size, rounds: int) -> dict[str, Any]:
    """Return the times of one call of a whole model."""
    torch.manual_seed(0)
    model = Model(size)
    data = model.data(size)
    ways, seconds = _programs(model, data, PLAN)
    ways |= {
        "eager plan": with_plan(deepcopy(model)),
        "eager styles": with_styles(deepcopy(model)),
    }
    return _timed(model, data, ways, rounds) | {"transformation": seconds}


def measure_mlp(width: int, rounds: int) -> dict[str, Any]:
    """Return the times of one call of an MLP."""
    torch.manual_seed(0)
    model, data = Mlp(width), (torch.randn(256, width),)
    ways, seconds = _programs(model, data, MLP_PLAN)
    begin = time.perf_counter()
    ways["torch"] = _by_torch(export(model, data)).module()
    seconds["torch"] = time.perf_counter() - begin
    return _timed(model, data, ways, rounds) | {"transformation": seconds}


def _programs(
    model: nn.Module, data: tuple[Any, ...], plan: Mapping[str, Any]
) -> tuple[dict[str, Callable[..., Any]], dict[str, float]]:
    """Return our program of this rank, the one written by hand, and the seconds to make ours."""
    torch.set_num_threads(1)
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = export(model, data)
    begin = time.perf_counter()
    program = shard_program(whole, mesh, plan)
    seconds = time.perf_counter() - begin
    written = export(by_hand(deepcopy(model)), data)
    return {
        "by hand": written.module(),
        "ours": program.module(),
        "by hand, aot_eager": torch.compile(written.module(), backend="aot_eager"),
        "ours, aot_eager": torch.compile(program.module(), backend="aot_eager"),
    }, {"ours": seconds}


def _by_torch(program: ExportedProgram) -> ExportedProgram:
    from torch.distributed.tensor.experimental._tp_transform import tensor_parallel_transformation
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return tensor_parallel_transformation(
        program.run_decompositions(),
        dist.get_rank(),
        dist.get_world_size(),
        "cpu",
        {"up": ColwiseParallel, "down": RowwiseParallel},
    )


def _timed(
    model: nn.Module, data: tuple[Any, ...], ways: Mapping[str, Callable[..., Any]], rounds: int
) -> dict[str, Any]:
    steps = {name: _call(way, data) for name, way in ways.items()}
    with torch.no_grad():
        expected = model(*data)
        for name, step in steps.items():
            found: Any = step()
            if isinstance(found, sw.DTensor):
                found = found.full_tensor()
            torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
        return {"times": taking_turns(steps, OURS, rounds)}


def _call(way: Callable[..., Any], data: tuple[Any, ...]) -> Call:
    return lambda: way(*data)


# ---- transformation, by one process


def llama_seconds() -> dict[str, float]:
    """Return the seconds to transform a Llama of 32 layers, for each choice of dynamic sizes."""
    batch, length = Dim("batch"), Dim("length", max=256)
    dynamic: dict[str, Any] = {
        "fixed sizes": None,
        "dynamic batch": ({0: batch},),
        "dynamic batch and length": ({0: batch, 1: length},),
    }
    with torch.device("meta"):
        model = Llama(Config(width=512, layers=32, hidden=1408))
        tokens = torch.zeros(2, 128, dtype=torch.int64)
    mesh = sw.DeviceMesh.abstract((2,), ("tp",))
    seconds = {}
    for name, shapes in dynamic.items():
        program = export(model, (tokens,), dynamic_shapes=shapes)
        begin = time.perf_counter()
        shard_program(program, mesh, PLAN)
        seconds[name] = time.perf_counter() - begin
    return seconds


# ---- the table


def main() -> None:
    """Measure, and print the tables."""
    with sw.Workers(2) as workers:
        for size in SIZES:
            found = workers.run(measure_model, size, ROUNDS[size.name])[0]
            _print(
                f"4 layers, {size.name} (width {size.width}, {size.batch} x {size.length} tokens)",
                found,
            )
            found = workers.run(measure_mlp, size.width, ROUNDS[size.name])[0]
            _print(f"MLP, {size.name} (width {size.width}, 256 tokens)", found)
    print("\nSeconds to transform a Llama of 32 layers (width 512), one process")
    for name, seconds in llama_seconds().items():
        verdict = "met" if seconds <= GOAL_SECONDS else "MISSED"
        print(f"  {name:26}{seconds:6.1f}  ({verdict}: {GOAL_SECONDS})")


def _print(what: str, found: dict[str, Any]) -> None:
    made = ", ".join(f"{name} {s:.2f} s" for name, s in found["transformation"].items())
    print(f"\n{what}, 2 gloo ranks; to transform: {made}; ms of a call: minimum (median)")
    least = {name: min(times) for name, times in found["times"].items()}
    for name, times in found["times"].items():
        shown = f"{least[name] * 1e3:.2f} ({statistics.median(times) * 1e3:.2f})"
        print(f"  {name:20}{shown:>18}", end="")
        other = name.replace("ours", "by hand")
        if other != name:
            ratio = least[name] / least[other]
            verdict = "met" if ratio <= GOAL else "MISSED"
            print(f"  {ratio:.3f} of {other} ({verdict}: {GOAL})", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
