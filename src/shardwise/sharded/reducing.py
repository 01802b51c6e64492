"""One number of all elements of shards that are no layout: their norm, which clip_grad_norm_ asks
for, and whether any or all are true."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise.sharded.tensor import ShardedTensor


def run(func: Any, args: Any, kwargs: Any, model: ShardedTensor) -> Any:
    """The number, on every rank; None for other functions, of some dims, or recorded."""
    recorded = model.requires_grad and torch.is_grad_enabled()
    if func in _NORMS and not recorded:
        return _NORMS[func](*args, **kwargs)
    if func in _TRUTHS and len(args) == 1 and not kwargs:
        here = func(torch.stack([func(each) for each in model._parts()]))
        return model._group.communicator.all_reduce(here, _TRUTHS[func])
    return None


def _norm(
    x: ShardedTensor,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: Any = None,
) -> Any:
    if dim is not None or keepdim or out is not None or not ord >= 0:
        return None
    result = torch.linalg.vector_norm(x._like(), 2, dtype=dtype)  # tells the dtype
    some = [each for each in x._tensors() if each.numel() > 0]
    parts = [torch.linalg.vector_norm(each, ord, dtype=dtype).double() for each in some]
    # In double precision, as the square of a norm may be no number where the norm is one.
    norms = torch.stack([result.new_zeros((), dtype=torch.float64), *parts])
    communicator = x._group.communicator
    if math.isinf(ord):
        return communicator.all_reduce(norms.max(), "max").to(result.dtype)
    power = ord or 1  # of order 0 it is how many are not 0
    total = communicator.all_reduce((norms**power).sum(), "sum")
    return (total ** (1 / power)).to(result.dtype)


def _old_norm(
    x: ShardedTensor,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    out: Any = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """`torch.norm`, which has another name for order 2."""
    order = 2 if p in ("fro", None) else p
    return None if isinstance(order, str) else _norm(x, order, dim, keepdim, dtype=dtype, out=out)


_NORMS: dict[Any, Any] = {
    torch.linalg.vector_norm: _norm,
    torch.norm: _old_norm,
    torch.Tensor.norm: _old_norm,
}
_TRUTHS = {torch.any: "max", torch.Tensor.any: "max", torch.all: "min", torch.Tensor.all: "min"}
