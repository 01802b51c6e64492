"""Differentiable collectives for lowerings, on local tensors.

| forward                             | backward                                    |
|-------------------------------------|---------------------------------------------|
| `all_reduce_sum`: all-reduce        | nothing                                     |
| `as_all_reduced`: nothing           | nothing                                     |
| `sum_grads_over`: nothing           | all-reduce                                  |
| `all_reduce_both_ways`: all-reduce  | all-reduce                                  |
| `all_gather_stack`: all-gather      | slice, or reduce-scatter (used beside shards) |
| `all_reduce_extreme`: all-reduce    | none: max and min are not differentiable    |
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardwise.comm import Pending, communicator
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.redistribute.autograd import apply_move, make_move_pair, redistribute_local


def all_reduce_sum(local: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int]) -> torch.Tensor:
    """Sum the contributions of the ranks along these axes; for bools return whether any is true.

    Forward: all-reduce. Backward: nothing, as every rank has the whole gradient.
    """
    if not axes:
        return local
    if local.dtype == torch.bool:
        return all_reduce_sum(local.to(torch.uint8), mesh, axes) != 0
    return redistribute_local(local, *_summed(local, mesh, axes))  # type: ignore[no-any-return]


def as_all_reduced(
    local: torch.Tensor, result: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int]
) -> torch.Tensor:
    """Return `result`, which is the known total of `local`, as if `all_reduce_sum` had computed it.

    Forward: nothing. Backward: nothing; second gradients communicate as those of `all_reduce_sum`
    do.
    """
    pair = make_move_pair(*_summed(local, mesh, axes))
    return apply_move(local, pair, Pending.done(result.clone()))


def _summed(local: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int]) -> tuple[Layout, Layout]:
    """Return the layouts before and after contributions along these axes are summed."""
    whole = Layout(mesh, tuple(local.shape))
    return whole.relaid(partial=dict.fromkeys(axes, "sum")), whole


def sum_grads_over(local: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int]) -> torch.Tensor:
    """Sum the gradients over these axes of a whole tensor that is used beside shards.

    Forward: nothing. Backward: all-reduce, as each rank's gradient is a contribution.
    """
    if not axes or not (local.requires_grad and torch.is_grad_enabled()):
        return local
    whole = Layout(mesh, tuple(local.shape))
    return redistribute_local(local, whole, whole, used_on=tuple(axes))  # type: ignore[no-any-return]


def all_reduce_both_ways(
    local: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int]
) -> torch.Tensor:
    """Sum contributions, and sum the gradients of the result over the same axes.

    Forward: all-reduce. Backward: all-reduce.
    """
    return sum_grads_over(all_reduce_sum(local, mesh, axes), mesh, axes)


def all_reduce_extreme(
    local: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int], op: str
) -> torch.Tensor:
    """Return the largest ("max") or smallest ("min") of each element over these axes.

    Forward: all-reduce. Backward: none; the result is detached.
    """
    local = local.detach()
    return communicator(mesh, tuple(axes)).all_reduce(local, op) if axes else local


def all_gather_stack(
    local: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int], *, is_used: bool = False
) -> torch.Tensor:
    """Stack the tensors of the ranks along these axes, in rank order, along a new first dim.

    Forward: all-gather. Backward: slice; reduce-scatter with `is_used`.

    Arguments:
        is_used: whether each rank combines the stack with its shards, so that its gradient is a
            contribution to a sum.
    """
    ranks = math.prod(mesh.shape[axis] for axis in axes)
    whole = Layout(mesh, (ranks, *local.shape))
    apart = whole.relaid([tuple(axes), *[()] * local.dim()])
    used_on = tuple(axes) if is_used else ()
    return redistribute_local(local.unsqueeze(0).contiguous(), apart, whole, used_on=used_on)  # type: ignore[no-any-return]
