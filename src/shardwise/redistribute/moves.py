"""Differentiable moves: a redistribution, and the one that carries its gradient back.

The cotangent of a tensor lies like the tensor, with pending sums made whole (`dual`). So

| forward                          | backward                     |
|----------------------------------|------------------------------|
| Partial -> Replicate             | nothing                      |
| Partial -> Shard                 | all-gather                   |
| Shard -> Replicate               | slice                        |
| Shard -> Replicate, used beside a shard | reduce-scatter        |
| Replicate -> Shard               | all-gather                   |
| Replicate or Shard -> Partial    | nothing, slice               |
| Shard -> Shard                   | the exchange, transposed     |
| Replicate, used beside a shard   | all-reduce                   |

"Used beside a shard" means that each rank's gradient is only a contribution: the cotangent is
pending a sum on those axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm import Pending
from shardwise.errors import LayoutError
from shardwise.layout import Layout
from shardwise.mesh import Axis
from shardwise.redistribute.cost import Costs
from shardwise.redistribute.execute import check_local, execute
from shardwise.redistribute.plan import dual, plan_redistribute


@dataclass(frozen=True)
class Move:
    """A linear map of a distributed tensor: from one layout to another, times a factor."""

    source: Layout
    target: Layout
    factor: float = 1.0
    dtype: torch.dtype | None = None
    """What travels, and what comes out. None: as it goes in."""
    costs: Costs | None = None

    def start(self, local: torch.Tensor) -> Pending[torch.Tensor]:
        """Run it on this rank's piece."""
        wire = local if self.dtype is None else local.to(self.dtype)
        plan = plan_redistribute(self.source, self.target, wire.dtype, costs=self.costs)
        pending = execute(plan, wire)
        return pending if self.factor == 1 else pending.then(lambda x: x * self.factor)


@dataclass(frozen=True)
class Pair:
    """A move and its transpose."""

    forward: Move
    backward: Move

    def transposed(self) -> Pair:
        """The move of the gradient, and back."""
        return Pair(self.backward, self.forward)


def _apply(local: torch.Tensor, pair: Pair, started: Pending[torch.Tensor] | None) -> torch.Tensor:
    result: torch.Tensor = _Redistribute.apply(local, pair, started)  # type: ignore[no-untyped-call]
    return result


class _Redistribute(torch.autograd.Function):
    """Forward: `pair.forward`. Backward: `pair.backward`, by this very function, so it can be
    differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, pair: Pair, pending: Pending[torch.Tensor] | None
    ) -> torch.Tensor:
        ctx.pair, ctx.dtype = pair, local.dtype
        started = pair.forward.start(local) if pending is None else pending
        result = started.wait()
        return result.view_as(result) if result is local else result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        result = _apply(gradients[0].contiguous(), ctx.pair.transposed(), None)
        return result.to(ctx.dtype), None, None


def redistribute_local(
    local: torch.Tensor,
    src: Layout,
    dst: Layout,
    *,
    used_on: Sequence[Axis] = (),
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
    costs: Costs | None = None,
) -> Any:
    """Move this rank's piece of a tensor from one layout to another; differentiable.

    Every rank of both meshes calls it. A rank outside `src`'s mesh passes an empty tensor of the
    dtype, and one outside `dst`'s mesh gets one.

    Arguments:
        local: this rank's piece in `src`.
        used_on: axes on which `dst` is whole and will be used beside shards, so that gradients
            come back as contributions: they are summed where the tensor came from (an all-gather
            then has a reduce-scatter as its backward, and no move an all-reduce).
        forward_dtype: convert to this before anything travels; the result has it.
        backward_dtype: the same for the gradient, which is converted back in the end.
        async_op: return a `Pending` at once. Its `wait()` gives the differentiable result.

    Returns:
        This rank's piece in `dst`, as a new tensor unless nothing was to do.
    """
    pair = _pair(src, dst, tuple(used_on), forward_dtype, backward_dtype, costs)
    if not (torch.is_grad_enabled() and local.requires_grad):
        pending = pair.forward.start(local.detach())
        return pending if async_op else pending.wait()
    _check_linear(src)
    _check_linear(dst)
    check_local(local, src)
    if not async_op:
        return _apply(local, pair, None)
    started = pair.forward.start(local.detach())
    return Pending(lambda: _apply(local, pair, started))


def _pair(
    src: Layout,
    dst: Layout,
    used_on: tuple[Axis, ...],
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
    costs: Costs | None,
) -> Pair:
    forward = Move(src, dst, 1.0, forward_dtype, costs)
    back = dual(dst)
    if used_on:
        for axis in map(dst.mesh.axis, used_on):
            if not dst.placements[axis].is_replicate():
                raise LayoutError(
                    f"used_on: expected axes on which {dst!r} is whole, "
                    f"got {dst.mesh.axis_name(axis)}: {dst.placements[axis]}"
                )
        back = Layout(dst.mesh, dst.shape, dst.shard_order, dict.fromkeys(used_on, "sum"))
    factor = _averaged(dst) / _averaged(src)
    return Pair(forward, Move(back, dual(src), factor, backward_dtype, costs))


def _averaged(layout: Layout) -> int:
    """Each contribution to a pending average counts for one part in so many."""
    return math.prod(layout.mesh.shape[axis] for axis, op in layout.partial if op == "avg")


def _check_linear(layout: Layout) -> None:
    for axis, op in layout.partial:
        if op not in ("sum", "avg"):
            raise LayoutError(
                f"a pending {op} on axis {layout.mesh.axis_name(axis)} of {layout!r} has no "
                "gradient, as it is not linear; detach() the tensor first"
            )
