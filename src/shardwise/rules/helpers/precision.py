"""Dtypes in which torch's kernels compute, with and without autocast.

A lowering that replaces one kernel of torch by several steps must round to a half type only once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_HALF = (torch.float16, torch.bfloat16)


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch accumulates: float32 for the half types, else the same."""
    return torch.float32 if dtype in _HALF else dtype


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a tensor to the dtype in which torch's kernels would accumulate it."""
    return tensor.to(wider(tensor.dtype))


def keeps_sums(dtype: torch.dtype | None) -> bool:
    """Return whether a cast to this dtype is linear; contributions must not become integers."""
    return dtype is None or dtype.is_floating_point or dtype.is_complex


def is_summed(dtype: torch.dtype) -> bool:
    """Return whether contributions of this dtype can be summed: not integers, not 8-bit floats."""
    return keeps_sums(dtype) and dtype.itemsize > 1


# ---- within autocast


def autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast an operand of a matrix product as autocast does."""
    device = tensor.device.type
    if _is_enabled(device) and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def autocast_wider(*tensors: torch.Tensor) -> torch.dtype:
    """Return the dtype of losses and sums of these tensors, under autocast the wider one."""
    dtype = tensors[0].dtype
    for each in tensors[1:]:
        dtype = torch.promote_types(dtype, each.dtype)
    return wider(dtype) if _is_enabled(tensors[0].device.type) else dtype


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Turn autocast off within the returned context, so that operators keep their dtypes."""
    return torch.autocast(device, enabled=False) if _is_enabled(device) else nullcontext()


def _is_enabled(device: str) -> bool:
    # torch raises an error if it is asked for autocast on the meta device.
    return device != "meta" and torch.is_autocast_enabled(device)
