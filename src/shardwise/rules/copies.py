"""Copies where torch has a view too: `x_copy`, a copy of the view `x`; and `x_scatter`, a copy of
the input in which the view `x` is overwritten.
"""

from __future__ import annotations

from typing import Any

import torch

import shardwise.rules.casts
import shardwise.rules.reshape  # noqa: F401 (views that have copies)
from shardwise.rules.assignment import ASSIGN, PUT, copy_of
from shardwise.rules.calls import composed, dispatched
from shardwise.rules.keys import ALL, mesh_of, static
from shardwise.rules.spec import normalized
from shardwise.rules.strides import check_source
from shardwise.tensor import DTensor

# ---- of views

_VIEWS = (
    "alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view",
    "view_as_complex", "view_as_real",
)  # fmt: skip


def _copy_form(view: str) -> None:
    """Register `view`_copy: the view, then a copy, also where the view moved and so is one: others
    may look at what it was moved to."""
    method = getattr(torch.Tensor, view, None)
    function = method if callable(method) else getattr(torch.ops.aten, view)

    @composed(f"{view}_copy")
    def copied(*args: Any, **kwargs: Any) -> Any:
        if "input" in kwargs:
            args = (kwargs.pop("input"), *args)
        result = dispatched(function, *args, **kwargs)
        if isinstance(result, torch.Tensor):
            return _contiguous_copy(result)
        return tuple(map(_contiguous_copy, result))


def _contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


for _name in _VIEWS:
    _copy_form(_name)


# ---- with a view overwritten


@composed("copy")
def copy(input: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> Any:
    """All of it: `copy_` of an input that stays as it was, and so lies as the source does."""
    mesh = mesh_of(input, src)
    source = src if isinstance(src, DTensor) else static(src, mesh)
    return source.to(input.dtype).expand(input.shape).clone()


@composed("select_scatter")
def select_scatter(input: torch.Tensor, src: torch.Tensor, dim: int, index: int) -> DTensor:
    """One row."""
    at = normalized(dim, input.dim())
    check_source(src, (*input.shape[:at], *input.shape[at + 1 :]))
    return _overwritten(input, src, (*[ALL] * at, int(index)))


@composed("slice_scatter")
def slice_scatter(
    input: torch.Tensor,
    src: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> DTensor:
    """Some rows."""
    at = normalized(dim, input.dim())
    rows = slice(start, end, step)
    count = len(range(input.shape[at])[rows])
    check_source(src, (*input.shape[:at], count, *input.shape[at + 1 :]))
    return _overwritten(input, src, (*[ALL] * at, rows))


def _overwritten(input: torch.Tensor, src: torch.Tensor, key: tuple[Any, ...]) -> DTensor:
    result = copy_of(input, mesh_of(input, src))
    ASSIGN.dispatched(result, key, src)
    return result


@composed("diagonal_scatter")
def diagonal_scatter(
    input: torch.Tensor, src: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> DTensor:
    """A diagonal, by the indices of its elements: each rank writes those that it has."""
    mesh = mesh_of(input, src)
    meta = torch.empty(input.shape, device="meta").diagonal(offset, dim1, dim2)
    check_source(src, meta.shape)
    row, column = (normalized(dim, input.dim()) for dim in (dim1, dim2))
    places = torch.arange(meta.shape[-1], device=input.device)
    indices: list[torch.Tensor | None] = [None] * input.dim()
    indices[row] = static(places + max(0, -offset), mesh)
    indices[column] = static(places + max(0, offset), mesh)
    first, last = min(row, column), max(row, column)
    result = copy_of(input, mesh)
    # Dims that tensors index stand where they were if they are neighbours, and else first.
    values = src.movedim(-1, first if last == first + 1 else 0)
    PUT.dispatched(result, tuple(indices[: last + 1]), values, False)
    return result
