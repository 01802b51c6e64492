"""Questions whose answer is a Python value, an array or a plain tensor: asked of the whole tensor.

They reduce or gather first, and never answer with a rank's own piece.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.rules.registry import handler
from shardwise.tensor import DTensor, unwrap
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
def asked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ask the whole tensor."""
    args = tuple(_whole(arg) for arg in args)
    with as_local():
        return func(*args, **kwargs)


def _whole(arg: Any) -> Any:
    if not isinstance(arg, DTensor):
        return arg
    if arg._layout.is_replicated:
        return unwrap(arg)
    # A history is kept, as torch refuses some of these questions because of it.
    return arg.full_tensor()
