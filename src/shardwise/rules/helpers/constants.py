"""Constants of rules as tensors that keep their values while a program is recorded.

A recorded program runs on meta tensors, which have no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def numbers(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Return a vector of numbers with the dtype and device of `like`."""
    if not like.is_meta:
        return torch.tensor(values, dtype=like.dtype, device=like.device)
    made = [torch.full((), each, dtype=like.dtype, device=like.device) for each in values]
    return torch.stack(made)


def take_rows(x: torch.Tensor, dim: int, rows: Any) -> torch.Tensor:
    """Take rows of a dim by number, in the given order."""
    index = torch.as_tensor(rows, dtype=torch.int64, device="cpu")
    if x.is_meta:
        key: Any = (*[slice(None)] * dim, index)
        return x[key]
    return x.index_select(dim, index.to(x.device))
