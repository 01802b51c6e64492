"""Precision: what torch's kernels compute in, and what autocast makes of their inputs.

A lowering that does by parts what torch does in one kernel must round to a half type only once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_HALF = (torch.float16, torch.bfloat16)


def wider(dtype: torch.dtype) -> torch.dtype:
    """What torch's kernels accumulate in: float32 for the half types, others as they are."""
    return torch.float32 if dtype in _HALF else dtype


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the dtype that torch's kernels would accumulate it in."""
    return tensor.to(wider(tensor.dtype))


def keeps_sums(dtype: torch.dtype | None) -> bool:
    """Whether a cast to this dtype is linear: contributions must not be rounded to integers."""
    return dtype is None or dtype.is_floating_point or dtype.is_complex


def is_summed(dtype: torch.dtype) -> bool:
    """Whether contributions may be cast to it: sums are not computed in floats of 8 bits."""
    return keeps_sums(dtype) and dtype.itemsize > 1


# ---- within autocast


def autocast(tensor: torch.Tensor) -> torch.Tensor:
    """What torch makes of an operand of a product of matrices."""
    device = tensor.device.type
    if _is_enabled(device) and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def autocast_wider(*tensors: torch.Tensor) -> torch.dtype:
    """The dtype that torch computes losses and sums of these tensors in, and gives them."""
    dtype = tensors[0].dtype
    for each in tensors[1:]:
        dtype = torch.promote_types(dtype, each.dtype)
    return wider(dtype) if _is_enabled(tensors[0].device.type) else dtype


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """What is computed within it is computed in the dtypes that it has."""
    return torch.autocast(device, enabled=False) if _is_enabled(device) else nullcontext()


def _is_enabled(device: str) -> bool:
    # torch knows no autocast of tensors without data, and does not ignore the question.
    return device != "meta" and torch.is_autocast_enabled(device)
