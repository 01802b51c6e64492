"""Tensor parallelism: a training step of ours beside one written by hand, and beside torch's.

Two gloo ranks of one thread each, float32, the same weights. In the same processes, taking turns:

- by hand: Megatron's scheme with raw collectives on local `nn.Linear`s;
- styles: our `parallelize_module`, local tensors between the modules;
- plan: our `shard_module`, DTensors all through;
- torch: `parallelize_module` of torch.distributed.tensor.parallel.

All must give one process's loss and gradients. A step is forward, backward and AdamW, and its time
is that of the slower rank. Both `parallelize_module`s prepare the input of attention and
feed-forward once, as each projection would else reduce a gradient of its own.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from benchmarks._transformer import MODELS, SIZES, Attention, FeedForward, Size
from benchmarks._turns import taking_turns

ROUNDS = {"small": 100, "large": 12}
GOAL_BY_HAND = 1.05
GOAL_TORCH = {"small": 0.8, "large": 1.0}
TOLERANCE = 1e-4


# ---- by hand


class _Enter(torch.autograd.Function):
    """Stands before layers that are split by columns. Forward: nothing. Backward: all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return _all_reduced(gradients[0].contiguous())


class _Leave(torch.autograd.Function):
    """Stands after a layer that is split by rows. Forward: all-reduce. Backward: nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _all_reduced(x.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _all_reduced(x: torch.Tensor) -> torch.Tensor:
    """All-reduce in place, as Megatron does: nobody else needs the contribution."""
    dist.all_reduce(x)
    return x


class _Attention(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Leave.apply(super().forward(_Enter.apply(x)))


class _FeedForward(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Leave.apply(super().forward(_Enter.apply(x)))


def by_hand(model: nn.Module) -> nn.Module:
    """Make a model of local layers, with collectives around attention and feed-forward."""
    for layer in model.layers:
        layer.attention.__class__ = _Attention
        layer.feed_forward.__class__ = _FeedForward
        for part in (layer.attention, layer.feed_forward):
            for name, linear in part.named_children():
                mine = linear.weight.detach().chunk(dist.get_world_size(), _split_dim(name))
                linear.weight = nn.Parameter(mine[dist.get_rank()].contiguous())
    return model


def _split_dim(linear: str) -> int:
    """Return the dim of a layer's weight that is split."""
    return 1 if linear in ("wo", "w2") else 0


# ---- ours


def with_styles(model: nn.Module) -> nn.Module:
    """Apply our styles."""
    return _styled(model, _mesh(), sw.parallel, sw.Replicate)


def with_plan(model: nn.Module) -> nn.Module:
    """Apply our plan: placements of parameters, by name."""
    columns, rows = {"tp": sw.Shard(0)}, {"tp": sw.Shard(1)}
    plan = {
        "layers.*.attention.w[qkv].weight": columns,
        "layers.*.attention.wo.weight": rows,
        "layers.*.feed_forward.w[13].weight": columns,
        "layers.*.feed_forward.w2.weight": rows,
    }
    return sw.parallel.shard_module(model, _mesh(), plan)


def _mesh() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


# ---- torch's


def with_torch(model: nn.Module) -> nn.Module:
    """Apply torch's styles."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, parallel

    return _styled(
        model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), parallel, Replicate
    )


def _styled(model: nn.Module, mesh: Any, parallel: Any, replicate: Any) -> nn.Module:
    plan = {}
    for part, columns, rows in (
        ("attention", ("wq", "wk", "wv"), "wo"),
        ("feed_forward", ("w1", "w3"), "w2"),
    ):
        plan[part] = parallel.PrepareModuleInput(
            input_layouts=(replicate(),), desired_input_layouts=(replicate(),)
        )
        plan |= {f"{part}.{name}": parallel.ColwiseParallel() for name in columns}
        plan[f"{part}.{rows}"] = parallel.RowwiseParallel()
    for layer in model.layers:
        parallel.parallelize_module(layer, mesh, plan)
    return model


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "by hand": by_hand,
    "styles": with_styles,
    "plan": with_plan,
    "torch": with_torch,
}


OURS = ("styles", "plan")


# ---- on every rank


def measure(kind: str, size: Size, rounds: int) -> dict[str, Any]:
    """Return the times of all implementations, in alternation, and their collectives per step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MODELS[kind](size)
    data = model.data(size)
    steps = {name: Step(way(deepcopy(model)), data) for name, way in WAYS.items()}
    _check(model, data, steps)
    counts = {name: _collectives(step) for name, step in steps.items()}
    times = taking_turns(steps, OURS, rounds)
    return {"times": times, "collectives": counts}


class Step:
    """Return a training step."""

    def __init__(self, model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.model, self.data = model, data
        # torch's fused and foreach steps refuse plain tensors beside DTensors in a group
        groups: dict[type, list[nn.Parameter]] = {}
        for parameter in model.parameters():
            groups.setdefault(type(parameter.data), []).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [{"params": group} for group in groups.values()], lr=1e-4, fused=True
        )

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.gradients()
        self.optimizer.step()

    def gradients(self) -> torch.Tensor:
        loss = self.model(*self.data)
        loss.backward()
        return loss


def _check(model: nn.Module, data: Any, steps: dict[str, Step]) -> None:
    """Check that all implementations give the loss and the gradients of one process."""
    expected = model(*data)
    expected.backward()
    for name, step in steps.items():
        loss = _whole(step.gradients())
        torch.testing.assert_close(loss, expected.detach(), rtol=TOLERANCE, atol=TOLERANCE)
        for (where, plain), mine in zip(
            model.named_parameters(), step.model.parameters(), strict=True
        ):
            gradient = _whole(mine.grad)
            if gradient.shape != plain.shape:  # written by hand: a shard
                pieces = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
                dist.all_gather(pieces, gradient.contiguous())
                gradient = torch.cat(pieces, _split_dim(where.split(".")[-2]))
            error = (gradient - plain.grad).abs().max() / plain.grad.abs().max()
            if error > TOLERANCE:
                raise AssertionError(f"{name}: the gradient of {where} is off by {error:.1e}")


def _whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


class _Collectives(TorchDispatchMode):
    """Counts all collectives, of shardwise, of torch and of code written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            kind = str(func).split(".")[1].replace("_", "").removesuffix("base")
            if not kind.startswith(("wait", "wrap")):
                self.seen[kind] += 1
        return func(*args, **(kwargs or {}))

    def __str__(self) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in sorted(self.seen.items()))


def _collectives(step: Step) -> str:
    """Return the collectives of a step."""
    step()
    with _Collectives() as seen:
        step()
    return str(seen)


# ---- the table


def main() -> None:
    """Measure, and print the tables."""
    with sw.Workers(2) as workers:
        for size in SIZES:
            for kind in MODELS:
                found = workers.run(measure, kind, size, ROUNDS[size.name])[0]
                _print(kind, size, found)


def _print(kind: str, size: Size, found: dict[str, Any]) -> None:
    print(
        f"\n{kind}, {size.name} (width {size.width}, {size.batch} x {size.length} tokens), "
        "2 gloo ranks; ms of a step: minimum (median)"
    )
    least = {name: min(times) for name, times in found["times"].items()}
    for name, times in found["times"].items():
        shown = f"{least[name] * 1e3:.2f} ({statistics.median(times) * 1e3:.2f})"
        print(f"  {name:10}{shown:>18}", end="")
        if name in OURS:
            for other, goal in (("by hand", GOAL_BY_HAND), ("torch", GOAL_TORCH[size.name])):
                ratio = least[name] / least[other]
                verdict = "met" if ratio <= goal else "MISSED"
                print(f"  {ratio:.2f} of {other} ({verdict}: {goal})", end="")
        print(f"  {found['collectives'][name]}", flush=True)


if __name__ == "__main__":
    main()
