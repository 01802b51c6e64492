"""A function of sharded tensors that are layouts: as DTensors, and back.

A result that is split comes back as a sharded tensor, and one that every rank has whole, or that is
pending a reduction, as a plain tensor. Where a DTensor was among the arguments, it stays a DTensor.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from shardwise.dispatch.writes import check_writable
from shardwise.layout import Layout
from shardwise.placement import Shard
from shardwise.rules.registry import name_of
from shardwise.sharded import converting
from shardwise.sharded.tensor import ShardedTensor
from shardwise.tensor import DTensor, unwrap
from shardwise.tensor_state import ensure_state
from shardwise.torch_internals import base_of, locally, pytree, version_of

_CONTAINERS = list, tuple, dict


def run(
    func: Any, args: Any, kwargs: Any, tensors: list[ShardedTensor], layouts: list[Layout]
) -> Any:
    """Run a function on DTensors in place of the sharded tensors among its arguments.

    Arguments:
        layouts: what the shards of each are; all on one mesh.
    """
    by_id: dict[int, _StandIn] = {}
    for tensor, layout in zip(tensors, layouts, strict=True):
        if id(tensor) not in by_id:
            by_id[id(tensor)] = _StandIn.of(tensor, layout)
    keeps_dtensors = False

    def as_dtensor(value: Any) -> Any:
        nonlocal keeps_dtensors
        if isinstance(value, ShardedTensor):
            return by_id[id(value)].dtensor
        if isinstance(value, _CONTAINERS):
            return pytree.tree_map(as_dtensor, value)
        keeps_dtensors |= isinstance(value, DTensor)
        return value

    def back(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        for each in by_id.values():
            if each.dtensor is value:  # written to in place, or returned as it was
                return each.tensor
        return value if keeps_dtensors else _sharded(value, tensors[0], layouts[0])

    given = [as_dtensor(each) for each in args]
    named = {name: as_dtensor(each) for name, each in kwargs.items()} if kwargs else kwargs
    result = func(*given, **named)
    for each in by_id.values():
        each.finish(func)
    return back(result) if type(result) is DTensor else pytree.tree_map(back, result)


class _StandIn(NamedTuple):
    """A DTensor in place of a sharded tensor."""

    tensor: ShardedTensor
    layout: Layout
    dtensor: DTensor
    copy: _Copy | None
    """The memory of the DTensor, where it is not the shard's own."""

    @staticmethod
    def of(tensor: ShardedTensor, layout: Layout) -> _StandIn:
        if converting.is_shared(tensor):
            return _StandIn(tensor, layout, converting.as_dtensor(tensor, layout), None)
        # In inference mode no tensor would know what it is a view of, nor that it was written to.
        outside = (
            torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
        )
        with outside, torch.set_grad_enabled(torch.is_grad_enabled()):
            made = converting.as_dtensor(tensor, layout)
            memory = locally(base_of, (), (made,))
            copy = _Copy(memory, version_of(memory), memory.grad_fn)
        return _StandIn(tensor, layout, made, copy)

    def finish(self, func: Any) -> None:
        """Note what was done to the DTensor in place."""
        if self.copy is not None:
            memory, version, history = self.copy
            if version_of(memory) != version:
                for each in self.tensor._parts():
                    check_writable(name_of(func), each)
                was_recorded = memory.grad_fn is not history
                with torch.set_grad_enabled(was_recorded and torch.is_grad_enabled()):
                    converting.write_back(self.tensor, self.layout, memory)
            # What is written to a view of it from now on would be lost: dispatch refuses that.
            ensure_state(memory).detached_by = name_of(func)
        if not self.tensor.requires_grad and self.dtensor.requires_grad:
            self.tensor._note_requires_grad(True)


class _Copy(NamedTuple):
    """What several shards were copied to, and how it was."""

    memory: torch.Tensor
    version: int
    history: Any


def _sharded(result: DTensor, model: ShardedTensor, layout: Layout) -> torch.Tensor:
    """A result as a sharded tensor, if it is split; with the shards of the model, if it lies so."""
    if result.requires_grad and result.is_leaf:  # as of torch.rand_like(x, requires_grad=True)
        apart: Any = result.detach()
        return _sharded(apart, model, layout).requires_grad_()
    if result._layout is layout:
        return converting.with_piece(model, layout, unwrap(result))
    layout = result._layout
    if not any(layout.shard_order):
        return result.full_tensor()
    if any(not each.is_shard() for each in layout.placements):
        # Along the axes that do not split it yet, its longest dim is split further.
        dim = max(range(layout.ndim), key=lambda dim: layout.shape[dim])
        result = result.redistribute(
            placements=[each if each.is_shard() else Shard(dim) for each in layout.placements]
        )
    return converting.from_dtensor(result, model._group)
