"""Views that permute, squeeze or expand dims, diagonals, windows (`unfold`); copies of views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.core.errors import LayoutError
from shardwise.dtensor.view_copy import cut_links, is_view_copy
from shardwise.dtensor.writes import is_detached_copy
from shardwise.rules.helpers.dims import as_dims, as_sizes
from shardwise.rules.helpers.row_exchange import mark_copy, share_rows
from shardwise.rules.registry import Aten, composed, dispatched, handler, rule
from shardwise.rules.spec import Out, Spec, SplitContext, dims_of, normalize_dim, takes_shards
from shardwise.torch_internals import as_local

_TENSOR: Any = torch.Tensor

# ---- dims in another order


def permute_spec(input: torch.Tensor, order: Sequence[int]) -> Spec:
    """Return the spec of a view with the dims in this order."""
    dims = dims_of(input)
    out = Out(tuple(dims[dim] for dim in order), tuple(input.shape[dim] for dim in order))
    return Spec([(input, dims)], [out], linear=[(0,)], is_view=True)


def swap_spec(input: torch.Tensor, first: int, second: int) -> Spec:
    """Return the spec of a view with two dims swapped."""
    order = list(range(input.dim()))
    if order:
        one, other = normalize_dim(first, input.dim()), normalize_dim(second, input.dim())
        order[one], order[other] = other, one
    return permute_spec(input, order)


@rule("transpose", "swapdims", inplace=False)
def transpose(input: torch.Tensor, dim0: int, dim1: int) -> Spec:
    return swap_spec(input, dim0, dim1)


@rule("swapaxes", inplace=False)
def swapaxes(input: torch.Tensor, axis0: int, axis1: int) -> Spec:
    return swap_spec(input, axis0, axis1)


@rule("t", "adjoint", _TENSOR.mT.__get__, _TENSOR.mH.__get__, _TENSOR.H.__get__,
      Aten("matrix_H"), Aten("mT"), Aten("mH"), inplace=False)  # fmt: skip
def matrix_transpose(input: torch.Tensor) -> Spec:
    return swap_spec(input, -2, -1) if input.dim() > 1 else permute_spec(input, range(input.dim()))


@rule(_TENSOR.T.__get__, Aten("numpy_T"), inplace=False)
def reversed_dims(input: torch.Tensor) -> Spec:
    return permute_spec(input, range(input.dim())[::-1])


@rule("permute", inplace=False)
def permute(input: torch.Tensor, *given: Any, dims: Any = ()) -> Spec:
    order = [normalize_dim(dim, input.dim()) for dim in as_sizes(given or (dims,))]
    if sorted(order) != list(range(input.dim())):
        raise RuntimeError(f"permute: expected each of {input.dim()} dims once, got {order}")
    return permute_spec(input, order)


@rule("movedim", "moveaxis", inplace=False)
def movedim(input: torch.Tensor, source: Any, destination: Any) -> Spec:
    sources, destinations = (
        [normalize_dim(dim, input.dim()) for dim in ((dims,) if isinstance(dims, int) else dims)]
        for dims in (source, destination)
    )
    moved = dict(zip(destinations, sources, strict=True))
    rest = iter(dim for dim in range(input.dim()) if dim not in sources)
    return permute_spec(
        input, [moved[at] if at in moved else next(rest) for at in range(input.dim())]
    )


# ---- dims of size 1


def _squeezed(input: torch.Tensor, dim: Any = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the dims that a call names, and those of them with size 1; None names all dims."""
    wanted = () if dim in ((), []) else as_dims(dim, input.dim())
    return wanted, tuple(at for at in wanted if input.shape[at] == 1)


@rule("squeeze", inplace=False)
def squeeze(input: torch.Tensor, dim: Any = None) -> Spec:
    wanted, gone = _squeezed(input, dim)
    dims = tuple(None if at in gone else f"d{at}" for at in range(input.dim()))
    kept = [at for at in range(input.dim()) if at not in gone]

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        local = context.inputs[0].local_shape()
        if all((local[at] == 1) == (at in gone) for at in wanted):
            return None
        # A shard may have one row of a longer dim.
        return takes_shards(lambda x, *args, **kwargs: x.squeeze(gone))

    out = Out(tuple(dims[at] for at in kept), tuple(input.shape[at] for at in kept))
    return Spec([(input, dims)], [out], linear=[(0,)], lower=lower, positions=(), is_view=True)


@rule("unsqueeze", inplace=False)
def unsqueeze(input: torch.Tensor, dim: int) -> Spec:
    at = normalize_dim(dim, input.dim() + 1)
    dims, shape = dims_of(input), tuple(input.shape)
    out = Out((*dims[:at], None, *dims[at:]), (*shape[:at], 1, *shape[at:]))
    return Spec([(input, dims)], [out], linear=[(0,)], is_view=True)


# ---- in-place forms: the tensor gets another layout and keeps its memory


@handler("t_", "transpose_", "swapdims_", "swapaxes_", "squeeze_", "unsqueeze_")
def in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    name = func.__name__.partition(".")[0].removesuffix("_")
    if is_view_copy(target):
        raise LayoutError(
            f"{name}_: this tensor is a part of another one, and of a dim that was split: it must "
            f"keep its dims, to be kept as that part is; use x = x.{name}(...)"
        )
    result = getattr(target.detach(), name)(*args[1:], **kwargs)
    if is_detached_copy(result):
        raise LayoutError(
            f"{name}_: it would have to move {target._layout!r}, and so cannot be done in place; "
            f"use x = x.{name}(...)"
        )
    if name == "squeeze":  # a shard may have one row of a longer dim
        _, gone = _squeezed(target, *args[1:], **kwargs)
        func, args, kwargs = torch.Tensor.squeeze_, (target, gone), {}
    with as_local():
        func(*args, **kwargs)
    target._layout = result._layout
    cut_links(target)
    return target


# ---- expansion: dims repeated without a copy


@rule("expand", "broadcast_to", inplace=False)
def expand(input: torch.Tensor, *sizes: Any, size: Any = (), implicit: bool = False) -> Spec:
    given = as_sizes(sizes or (size,))
    added = len(given) - input.dim()
    dims: list[str | None] = [None] * input.dim()
    shape = list(given)
    for at, found in enumerate(input.shape):
        wanted = given[at + added]
        if wanted in (-1, found):
            dims[at], shape[at + added] = f"d{at}", found
        elif found != 1:
            raise RuntimeError(f"expand: expected {found} at dim {at + added}, got {wanted}")

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        local = context.outputs[0].local_shape()
        if all(want in (-1, have) for want, have in zip(given, local, strict=True)):
            return None
        return takes_shards(lambda x, *args, **kwargs: x.expand(local))

    out = Out((*[None] * added, *dims), tuple(shape))
    return Spec(
        [(input, tuple(dims))], [out], linear=[(0,)], lower=lower, positions=(), is_view=True
    )


# ---- diagonals and windows


def diagonal_spec(
    input: torch.Tensor, offset: int, dim1: int, dim2: int, name: str, is_view: bool
) -> Spec:
    """Return the spec of a diagonal; if a dim is split, each rank contributes its elements."""
    row, column = normalize_dim(dim1, input.dim()), normalize_dim(dim2, input.dim())
    if row == column:
        raise RuntimeError(f"{name}: expected two dims, got {dim1} and {dim2}")
    dims = dims_of(input)
    rest = [dim for dim in range(input.dim()) if dim not in (row, column)]
    length = min(input.shape[row] + min(offset, 0), input.shape[column] - max(offset, 0))
    length = max(length, 0)

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        axes = context.axes(dims[row], dims[column])
        if not axes:
            return None
        (start, _), (left, _) = (context.inputs[0].range(dim) for dim in (row, column))
        shift = offset + start - left
        first = start + max(0, -shift) - max(0, -offset)

        def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            part = x.diagonal(shift, row, column)
            whole = share_rows(name, part, part.dim() - 1, first, length, context.mesh, axes)
            return mark_copy(whole, name) if is_view else whole

        return run

    out = Out((*(dims[dim] for dim in rest), None), (*(input.shape[dim] for dim in rest), length))
    split = {f"d{row}": "whole", f"d{column}": "whole"}
    return Spec(
        [(input, dims)],
        [out],
        reduces=split,
        linear=[(0,)],
        lower=lower,
        positions=[*split],
        is_view=is_view,
    )


@rule("diagonal", inplace=False)
def diagonal(input: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Spec:
    return diagonal_spec(input, offset, dim1, dim2, "diagonal", is_view=True)


@rule("linalg.diagonal")  # its defaults differ from torch.diagonal's
def linalg_diagonal(A: torch.Tensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Spec:
    return diagonal_spec(A, offset, dim1, dim2, "diagonal", is_view=True)


@rule("diag", inplace=False)
def diag(input: torch.Tensor, diagonal: int = 0) -> Spec | None:
    if input.dim() == 2:
        return diagonal_spec(input, diagonal, 0, 1, "diag", is_view=False)
    return diag_embed(input, diagonal)


@rule("diag_embed", inplace=False)
def diag_embed(input: torch.Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Spec:
    dims = (*dims_of(input)[:-1], None)
    places = {normalize_dim(dim, input.dim() + 1) for dim in (dim1, dim2)}
    size = input.shape[-1] + abs(offset)
    rest = iter(range(input.dim() - 1))
    order = [None if at in places else next(rest) for at in range(input.dim() + 1)]
    out = Out(
        tuple(None if dim is None else dims[dim] for dim in order),
        tuple(size if dim is None else input.shape[dim] for dim in order),
    )
    return Spec([(input, dims)], [out], linear=[(0,)])


@composed("diagflat")
def diagflat(input: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Return a matrix with all elements of the input on a diagonal."""
    return input.flatten().diag_embed(offset)


@rule(torch.Tensor.unfold, Aten("unfold"), inplace=False)
def windows(input: torch.Tensor, dimension: int, size: int, step: int) -> Spec:
    at = normalize_dim(dimension, input.dim())
    dims = [*dims_of(input)]
    shape = [*input.shape]
    if input.dim():
        dims[at] = None
        shape[at] = (shape[at] - size) // step + 1
    out = Out((*dims, None), (*shape, size))
    return Spec([(input, tuple(dims))], [out], linear=[(0,)], is_view=True)


# ---- copies of views: `x_copy` returns a copy of the view `x`

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
        given = (*args, *kwargs.values())
        if view == "view" and not any(isinstance(each, torch.dtype) for each in given):
            result = dispatched(torch.Tensor.reshape, *given)  # of any strides
        else:
            result = dispatched(function, *args, **kwargs)
        if isinstance(result, torch.Tensor):
            return _contiguous_copy(result)
        return tuple(map(_contiguous_copy, result))


def _contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


for _name in _VIEWS:
    _copy_form(_name)
