"""Pointwise functions of shards that are no layout: shard by shard.

Whether a function is pointwise its rule says (`shardwise.rules`): every dim of its results is a
factor, the sharded tensors have all of them, and nothing is reduced or needs to know where it is.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from shardwise.box import Box
from shardwise.rules.registry import lookup
from shardwise.rules.spec import Dims, Spec

if TYPE_CHECKING:
    from shardwise.sharded.tensor import ShardedTensor


def run(func: Any, args: Any, kwargs: Any, tensors: list[ShardedTensor]) -> Any:
    """Run a function shard by shard; NotImplemented if it does not work so."""
    model = tensors[0]
    spec = _spec(func, args, kwargs)
    if spec is None or any(each._held != model._held for each in tensors):
        return NotImplemented
    dims = {id(tensor): names for tensor, names in spec.inputs}
    if any(dims.get(id(each)) != spec.outputs[0].dims for each in tensors):
        return NotImplemented

    def piece(box: Box, at: int, value: Any) -> Any:
        if isinstance(value, type(model)):
            if not value._local_shards:  # the same on nothing: tells the dtype of the result
                return value._like().new_empty(box.shape).requires_grad_(value.requires_grad)
            return value._local_shards[at].tensor
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return value[_slices(dims[id(value)], spec.outputs[0].dims, box)]
        return value

    boxes = model._held.by(model._group.rank)
    results = []
    for at, box in enumerate(boxes or [_nothing(model)]):
        here, by_name = pytree.tree_map(partial(piece, box, at), (args, kwargs))
        results.append(func(*here, **by_name))
    if lookup(func).outplace is not None:  # type: ignore[union-attr]
        target: ShardedTensor = args[0]
        target._note_requires_grad(results[0].requires_grad)
        return target
    return pytree.tree_map(lambda *each: _joined(model, each), *results)


def _nothing(model: ShardedTensor) -> Box:
    corner = (0,) * len(model.shape)
    return Box(corner, corner)


def _joined(model: ShardedTensor, pieces: tuple[torch.Tensor, ...]) -> ShardedTensor:
    """A result of each shard as a sharded tensor; of a rank without shards, of none."""
    return model._with(
        pieces[: len(model._local_shards)],
        dtype=pieces[0].dtype,
        requires_grad=pieces[0].requires_grad,
        pin_memory=False,
    )


def _spec(func: Any, args: Any, kwargs: Any) -> Spec | None:
    """What its rule says of a call, if that is pointwise."""
    known = lookup(func)
    if known is None or known.rule is None or kwargs.get("out") is not None:
        return None
    spec = known.rule(*args, **kwargs)
    if not isinstance(spec, Spec) or spec.lower is not None or spec.reduces or spec.scales:
        return None
    first = spec.outputs[0].dims
    if None in first or any(out.dims != first for out in spec.outputs):
        return None
    return spec


def _slices(dims: Dims, factors: Dims, box: Box) -> tuple[slice, ...]:
    """The part of a plain tensor that meets a box."""
    return tuple(slice(None) if name is None else box.slices[factors.index(name)] for name in dims)
