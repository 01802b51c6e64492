"""Numbers that rules know, as tensors: of data also where other tensors have none.

While a program is recorded, tensors are on the meta device, where data are forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def numbers(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """A few numbers, of the dtype and on the device of a tensor."""
    if not like.is_meta:
        return torch.tensor(values, dtype=like.dtype, device=like.device)
    made = [torch.full((), each, dtype=like.dtype, device=like.device) for each in values]
    return torch.stack(made)


def picked(x: torch.Tensor, dim: int, rows: Any) -> torch.Tensor:
    """These rows, in this order: a list, or an array of numpy's."""
    index = torch.as_tensor(rows, dtype=torch.int64, device="cpu")
    if x.is_meta:
        key: Any = (*[slice(None)] * dim, index)
        return x[key]
    return x.index_select(dim, index.to(x.device))
