"""Tensors like another, and tensors filled with numbers.

Random numbers do not depend on how a tensor is cut: shards that are no layout get those of a tensor
cut into chunks, which is made and moved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn import init

from shardwise import factories
from shardwise.placement import Replicate, Shard
from shardwise.rules.calls import input_of, tensors_in
from shardwise.rules.pointwise import names
from shardwise.sharded.tensor import ShardedTensor
from shardwise.tensor import DTensor

LIKE = [torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like]

_RANDOM_LIKE = {torch.rand_like, torch.randn_like, torch.randint_like}
_FILLED = {
    *(getattr(torch.Tensor, name) for name in names("""
        bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_
    """)),
    torch.eye,
}  # fmt: skip
"""What writes to a tensor without looking at what is in it."""
_INITIALIZED = {init.uniform_, init.normal_, init.constant_, init.kaiming_uniform_}
"""The same, and unknown to autograd: parameters can be written to."""
_DROPOUT = {torch.dropout, torch.dropout_, F.dropout}


def like(func: Any) -> Callable[..., Any]:
    """A function that makes a tensor like another, shard by shard."""

    def made(input: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
        model = func(input._like(), *args, **kwargs)
        return input._with(
            [func(each, *args, **kwargs) for each in input._tensors()],
            nothing=model,
            device=model.device,
            dtype=model.dtype,
            requires_grad=model.requires_grad,
            pin_memory=bool(kwargs.get("pin_memory", False)),
        )

    return made


def run(func: Any, args: Any, kwargs: Any, model: ShardedTensor) -> Any:
    """Fill shards that are no layout; None if that is not what the function does."""
    if func in _FILLED or func in _INITIALIZED:
        args, kwargs = _instead_of(model, _in_chunks(model), args, kwargs)
        filled = func(*args, **kwargs)
        with torch.set_grad_enabled(torch.is_grad_enabled() and func in _FILLED):
            return model.copy_(filled)
    if func in _RANDOM_LIKE:
        args, kwargs = _instead_of(model, _in_chunks(model), args, kwargs)
        return _as(model, func(*args, **kwargs))
    if func in _DROPOUT:
        return _dropped_out(func, args, kwargs)
    if func is torch.Tensor.__setitem__ and not _is_recorded(args):
        chunks = _in_chunks(model)
        whole = model.full_tensor()
        chunks.copy_(whole)
        func(*_instead_of(model, chunks, args, kwargs)[0])
        return model.copy_(chunks)
    return None


def _is_recorded(args: Any) -> bool:
    return torch.is_grad_enabled() and any(each.requires_grad for each in tensors_in(args))


def _dropped_out(func: Any, args: Any, kwargs: Any) -> Any:
    """The tensor times what dropout makes of ones."""
    input: Any = input_of(args, kwargs)
    rest = list(args[1:])
    named = {name: each for name, each in kwargs.items() if each is not input}
    in_place = func is torch.dropout_ or named.pop("inplace", False) or rest[2:] == [True]
    ones = torch.ones_like(_in_chunks(input))
    kept: Any = F.dropout if func is F.dropout else torch.dropout
    with torch.no_grad():
        factors = _as(input, kept(ones, *rest[:2], **named))
    return input.mul_(factors) if in_place else input * factors


def _as(model: ShardedTensor, made: DTensor) -> ShardedTensor:
    """A tensor of the model's size as shards like the model's."""
    pieces = model._pieces_of(made.detach())
    result = model._with(pieces, dtype=made.dtype, requires_grad=False, pin_memory=False)
    return result.requires_grad_(made.requires_grad)


def _in_chunks(model: ShardedTensor) -> DTensor:
    """A tensor of the same size that is a layout."""
    mesh = model._group.mesh(model.device.type)
    placement = Shard(0) if model.shape else Replicate()
    return factories.empty(model.shape, dtype=model.dtype, device_mesh=mesh, placements=[placement])


def _instead_of(model: ShardedTensor, other: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return (
        tuple(other if each is model else each for each in args),
        {name: other if each is model else each for name, each in kwargs.items()},
    )
