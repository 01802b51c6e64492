"""Conversions of a DTensor to a Python value, an array or text: of the global tensor.

They reduce or gather first; the result is never that of this rank's shard alone.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.dtensor.tensor import DTensor, unwrap
from shardwise.rules.registry import handler
from shardwise.torch_internals import as_local

_Tensor = torch.Tensor


@handler(
    "item",
    "tolist",
    "is_nonzero",
    _Tensor.__bool__,
    _Tensor.__float__,
    _Tensor.__int__,
    _Tensor.__complex__,
    _Tensor.__index__,
    _Tensor.__contains__,
    _Tensor.__array__,
    _Tensor.numpy,
    _Tensor.__format__,
    _Tensor.__dlpack__,
)
def run_on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function on the whole tensors."""
    args = tuple(_as_whole(arg) for arg in args)
    with as_local():
        return func(*args, **kwargs)


def _as_whole(arg: Any) -> Any:
    if not isinstance(arg, DTensor):
        return arg
    if arg._layout.is_replicated:
        return unwrap(arg)
    # With its history, because torch refuses some of these conversions for tensors that have one.
    return arg.full_tensor()
