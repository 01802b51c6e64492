"""torch.masked: Python code that no tensor overrides; it is made of functions that are dispatched.

It asks whether a layout is one of a set, which is a question of hashes: there a `Layout` cannot
pass for `torch.strided`, as it does where the two are compared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.masked import _ops

from shardwise.tensor import DTensor

_input_mask: Any = _ops._input_mask


def input_mask(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The mask of an input, as bools of its shape."""
    mask = kwargs.get("mask")
    if not isinstance(input, DTensor) or not isinstance(mask, torch.Tensor):
        return _input_mask(input, *args, **kwargs)  # type: ignore[no-any-return]
    if mask.layout != torch.strided:
        mask = mask.to_dense()
    if mask.dim() > input.dim():
        raise IndexError(
            f"torch.masked: expected a mask of at most {input.dim()} dims, as the input has; "
            f"got {mask.dim()}"
        )
    return mask.to(torch.bool).broadcast_to(input.shape)


_ops._input_mask = input_mask
