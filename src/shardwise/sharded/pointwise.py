"""Pointwise functions of shards that are no layout: shard by shard.

Whether a function is pointwise its rule says (`shardwise.rules`): every dim of its results is a
factor, the sharded tensors have all of them, and nothing is reduced or needs to know where it is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from shardwise.box import Box
from shardwise.rules.calls import input_of, tensors_in
from shardwise.rules.registry import lookup
from shardwise.rules.spec import Dims, Spec
from shardwise.sharded.moving import same
from shardwise.sharded.tensor import ShardedTensor
from shardwise.torch_internals import pytree


def run(func: Any, args: Any, kwargs: Any, tensors: list[ShardedTensor]) -> Any:
    """Run a function shard by shard; None if it does not work so."""
    model = tensors[0]
    out = kwargs.get("out")
    if out is not None:
        kwargs = {name: each for name, each in kwargs.items() if name != "out"}
    spec = _spec(func, args, kwargs)
    if spec is None or any(each._held != model._held for each in tensors):
        return None
    whole = spec.outputs[0].dims
    dims = {id(tensor): found for tensor, found in spec.inputs}
    for each in tensors_in((args, kwargs)):
        found = dims.get(id(each))
        if found is None or (isinstance(each, ShardedTensor) and found != whole):
            return None
    target = input_of(args, kwargs) if is_in_place(func) else out
    if target is not None and not isinstance(target, ShardedTensor):
        return None

    def shared(value: Any) -> Any:
        """A plain tensor gets gradients from the shards of all ranks."""
        is_plain = isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor)
        if not (is_plain and value.requires_grad and torch.is_grad_enabled()):
            return value
        known = same(value, model._group)
        dims[id(known)] = dims[id(value)]
        return known

    def piece(box: Box, at: int, value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            parts = value._tensors() or [_stand_in(value, box, value is target)]
            return parts[at]
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return value[_slices(dims[id(value)], whole, box)]
        return value

    args, kwargs = pytree.tree_map(shared, (args, kwargs))
    results: list[Any] = []
    # On a rank without shards the same of nothing: it tells the dtype, and what is refused.
    for at, box in enumerate(model._held.by(model._group.rank) or [model._held.nowhere]):
        here, by_name = pytree.tree_map(partial(piece, box, at), (args, kwargs))
        results.append(func(*here, **by_name))
    if not isinstance(results[0], torch.Tensor | tuple | list):
        return results[0]  # Python's own answer to x == None
    if target is not None and target is not out:
        if any(each.requires_grad for each in results):
            target._note_requires_grad(True)
            if not whole and not target._local_shards:  # what was written to was a stand-in
                (result,) = results
                target._nothing = result.reshape(-1)[:0]
        return target
    made = pytree.tree_map(lambda *each: model._with_results(each), *results)
    if out is None:
        return made
    if not torch.can_cast(made.dtype, out.dtype):
        raise RuntimeError(
            f"result type {made.dtype} can't be cast to the desired output type {out.dtype}"
        )
    return out.copy_(made)


def is_in_place(func: Any) -> bool:
    """Whether a function writes to its input."""
    known = lookup(func)
    return known is not None and known.outplace is not None


def _stand_in(value: ShardedTensor, box: Box, is_written: bool) -> torch.Tensor:
    """In place of a shard, where there is none. Without dims there is no tensor of no elements."""
    if box.start:
        return value._empty(box.shape)
    nothing = value._empty()
    if not nothing.requires_grad:
        return nothing.new_ones(())
    if is_written and nothing.is_leaf and torch.is_grad_enabled():  # as torch says where it is
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation."
        )
    return nothing.sum() + 1


def _spec(func: Any, args: Any, kwargs: Any) -> Spec | None:
    """What its rule says of a call, if that is pointwise."""
    known = lookup(func)
    if known is None or known.rule is None:
        return None
    spec = known.rule(*args, **kwargs)
    if not isinstance(spec, Spec) or spec.lower or spec.allows or spec.reduces or spec.scales:
        return None
    first = spec.outputs[0].dims
    if None in first or any(out.dims != first for out in spec.outputs):
        return None
    return spec


def _slices(dims: Dims, factors: Dims, box: Box) -> tuple[slice, ...]:
    """The part of a plain tensor that meets a box."""
    return tuple(slice(None) if name is None else box.slices[factors.index(name)] for name in dims)
