"""Tensors like another, and tensors filled with numbers.

Random numbers do not depend on how a tensor is cut: shards that are no layout get those of a tensor
cut into chunks, which is made and moved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import init

from shardwise import factories
from shardwise.placement import Replicate, Shard
from shardwise.sharded import converting
from shardwise.tensor import DTensor

if TYPE_CHECKING:
    from shardwise.sharded.tensor import ShardedTensor

LIKE = [torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like]

_RANDOM_LIKE = {torch.rand_like, torch.randn_like, torch.randint_like}
_RANDOM_IN_PLACE = {
    getattr(torch.Tensor, f"{name}_")
    for name in [
        "bernoulli",
        "cauchy",
        "exponential",
        "geometric",
        "log_normal",
        "normal",
        "random",
        "uniform",
    ]
}
_INITIALIZE = {init.uniform_, init.normal_, init.constant_, init.kaiming_uniform_}


def like(func: Any) -> Callable[..., Any]:
    """A function that makes a tensor like another, shard by shard."""

    def made(tensor: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
        model = func(tensor._like(), *args, **kwargs)
        moved = model.device != tensor.device
        return tensor._with(
            [func(each, *args, **kwargs) for each in tensor._tensors()],
            device=model.device if moved else None,
            dtype=model.dtype,
            requires_grad=model.requires_grad,
            pin_memory=bool(kwargs.get("pin_memory", False)),
        )

    return made


def run(func: Any, args: Any, kwargs: Any, model: ShardedTensor) -> Any:
    """Fill shards that are no layout; NotImplemented if that is not what the function does."""
    in_place = func in _RANDOM_IN_PLACE or func in _INITIALIZE
    if not in_place and func not in _RANDOM_LIKE:
        return NotImplemented
    args, kwargs = _instead_of(model, _in_chunks(model), args, kwargs)
    result = converting.from_dtensor(func(*args, **kwargs), model._group)
    if in_place:
        with torch.no_grad():
            return model.copy_(result)
    pieces = [each.detach() for each in model._pieces_of(result)]
    made = model._with(pieces, dtype=result.dtype, requires_grad=False, pin_memory=False)
    return made.requires_grad_(result.requires_grad)


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
