"""Operators that copy where others return a view.

`x_copy` returns a copy of the view `x`; `x_scatter` returns a copy of the input in which the view
`x` is overwritten.
"""

from __future__ import annotations

from typing import Any

import torch

import shardwise.rules.pointwise.casts
import shardwise.rules.shape.reshape  # noqa: F401 (views that have copies)
from shardwise.dtensor.tensor import DTensor
from shardwise.rules.helpers.composed_ops import composed, dispatched
from shardwise.rules.helpers.index_key import ALL, mesh_of, static
from shardwise.rules.index.assignment import ASSIGN, PUT, copy_of
from shardwise.rules.shape.strides import check_source
from shardwise.rules.spec import normalize_dim

# ---- of views

_VIEWS = (
    "alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view",
    "view_as_complex", "view_as_real",
)  # fmt: skip


def _copy_form(view: str) -> None:
    """Register `view`_copy: take the view, then copy it.

    The copy is needed also where the view had to be redistributed: other calls may reuse the
    redistributed tensor.
    """
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
    """Return a copy of the source in the shape and dtype of the input, with the source's layout."""
    mesh = mesh_of(input, src)
    source = src if isinstance(src, DTensor) else static(src, mesh)
    return source.to(input.dtype).expand(input.shape).clone()


@composed("select_scatter")
def select_scatter(input: torch.Tensor, src: torch.Tensor, dim: int, index: int) -> DTensor:
    """Return a copy of the input with one row replaced."""
    at = normalize_dim(dim, input.dim())
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
    """Return a copy of the input with some rows replaced."""
    at = normalize_dim(dim, input.dim())
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
    """Return a copy of the input with a diagonal replaced; each rank writes its own elements."""
    mesh = mesh_of(input, src)
    meta = torch.empty(input.shape, device="meta").diagonal(offset, dim1, dim2)
    check_source(src, meta.shape)
    row, column = (normalize_dim(dim, input.dim()) for dim in (dim1, dim2))
    places = torch.arange(meta.shape[-1], device=input.device)
    indices: list[torch.Tensor | None] = [None] * input.dim()
    indices[row] = static(places + max(0, -offset), mesh)
    indices[column] = static(places + max(0, offset), mesh)
    first, last = min(row, column), max(row, column)
    result = copy_of(input, mesh)
    # As in torch, indexed dims stay in place if they are adjacent, and come first otherwise.
    values = src.movedim(-1, first if last == first + 1 else 0)
    PUT.dispatched(result, tuple(indices[: last + 1]), values, False)
    return result
