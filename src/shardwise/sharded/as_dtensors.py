"""A function of sharded tensors that are layouts: as DTensors, and back.

A result that is split comes back as a sharded tensor, and one that every rank has whole, or that is
pending a reduction, as a plain tensor. Where a DTensor was among the arguments, it stays a DTensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from shardwise.placement import Shard
from shardwise.rules.calls import tensors_in
from shardwise.sharded import converting
from shardwise.tensor import DTensor

if TYPE_CHECKING:
    from shardwise.sharded.tensor import ShardedTensor


def run(func: Any, args: Any, kwargs: Any, model: ShardedTensor) -> Any:
    """Run a function on DTensors in place of the sharded tensors among its arguments."""
    kind = type(model)
    made: dict[int, tuple[ShardedTensor, DTensor]] = {}
    keeps_dtensors = any(isinstance(each, DTensor) for each in tensors_in((args, kwargs)))

    def as_dtensor(value: Any) -> Any:
        if not isinstance(value, kind):
            return value
        if id(value) not in made:
            made[id(value)] = value, converting.to_dtensor(value)
        return made[id(value)][1]

    def back(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        for given, dtensor in made.values():
            if dtensor is value:  # written to in place
                given._note_requires_grad(value.requires_grad)
                return given
        return value if keeps_dtensors else _sharded(value, model)

    args, kwargs = pytree.tree_map(as_dtensor, (args, kwargs))
    return pytree.tree_map(back, func(*args, **kwargs))


def _sharded(result: DTensor, model: ShardedTensor) -> torch.Tensor:
    layout = result.layout
    if not any(layout.shard_order):
        return result.full_tensor()
    if any(not each.is_shard() for each in layout.placements):
        # Along the axes that do not split it yet, its longest dim is split further.
        dim = max(range(layout.ndim), key=lambda dim: layout.shape[dim])
        result = result.redistribute(
            placements=[each if each.is_shard() else Shard(dim) for each in layout.placements]
        )
    return converting.from_dtensor(result, model._group)
