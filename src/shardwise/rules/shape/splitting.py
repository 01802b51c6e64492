"""Parts of a tensor along a dim: local views, unless the dim itself is split.

For a split dim, a part of several rows stays split (rows move between ranks), and the owner of a
single row gives it to all ranks. Whole pieces of a dim that is cut in pieces do not move.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from shardwise.core import cut as cuts_of
from shardwise.core.cut import Cut
from shardwise.rules.helpers.dims import drop_dims, replace_dim
from shardwise.rules.helpers.row_exchange import mark_copy, plan_row_exchange, share_rows
from shardwise.rules.registry import rule
from shardwise.rules.spec import Out, Spec, SplitContext, dims_of, normalize_dim, takes_shards

# ---- one part


def _key(dim: int, rows: range) -> tuple[slice, ...]:
    """Return the index that selects rows along a dim."""
    return *_all(dim), slice(rows.start, rows.stop, rows.step)


def _all(count: int) -> tuple[slice, ...]:
    return (slice(None),) * count


def one_row_spec(
    input: torch.Tensor, dim: int, index: int, name: str, *, keep: bool, is_view: bool = True
) -> Spec:
    """Return the spec of one row along a dim; if the dim is split, its owner gives it to all."""
    dims, shape = dims_of(input), tuple(input.shape)
    out = Out(replace_dim(dims, dim, None), replace_dim(shape, dim, 1))
    if not keep:
        out = Out(drop_dims(dims, (dim,)), drop_dims(shape, (dim,)))

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        axes = context.axes(dims[dim])
        if not axes:
            return None
        start, stop = context.inputs[0].range(dim)
        is_here = start <= index < stop
        at = slice(index, index + 1) if keep else index
        key = (*_all(dim), at)
        first = index - start if is_here else 0

        def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            part = x.narrow(dim, first, int(is_here))
            whole = share_rows(name, part, dim, 0, 1, context.mesh, axes)
            whole = whole if keep else whole.squeeze(dim)
            return mark_copy(whole, name, key) if is_view else whole

        return run

    return Spec(
        [(input, dims)],
        [out],
        reduces={f"d{dim}": "whole"},
        linear=[(0,)],
        lower=lower,
        positions=(f"d{dim}",),
        is_view=is_view,
    )


# ---- whole pieces of a dim that is cut in pieces are local views

Recut = Callable[[str, int, Cut, tuple[int, ...]], Cut | None]


def whole_pieces(name: str | None, parts: Sequence[range]) -> Recut:
    """Return the function for `Spec.recut` if each result is one of these parts of a factor's
    dim."""

    def recut(factor: str, number: int, cut: Cut, counts: tuple[int, ...]) -> Cut | None:
        if factor != name:
            return cut
        rows = parts[number]
        if len(rows) > 1 and rows.step != 1:
            return None
        return cuts_of.cut_between(cut, rows.start, max(rows.stop, rows.start))

    return recut


def local_places(context: SplitContext, dim: int, parts: Sequence[range]) -> list[tuple[int, int]]:
    """Return start and length in the local tensor of parts that are whole pieces of a split dim."""
    ranges = context.inputs[0].ranges(dim)
    found = []
    for rows, out in zip(parts, context.outputs, strict=True):
        found.append((cuts_of.count_below(ranges, rows.start), out.local_shape()[dim]))
    return found


def part_spec(
    input: torch.Tensor, dim: int, rows: range, name: str, *, is_view: bool = True
) -> Spec:
    """Return the spec of some rows along a dim."""
    if len(rows) == 1 and input.shape[dim] > 1:
        return one_row_spec(input, dim, rows[0], name, keep=True, is_view=is_view)
    dims, shape = dims_of(input), tuple(input.shape)

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        axes = context.axes(dims[dim])
        if not axes:
            return None
        if context.inputs[0].cuts[dim] is not None or rows == range(shape[dim]):
            ((start, length),) = local_places(context, dim, [rows])
            take = torch.narrow if is_view else torch.narrow_copy
            return takes_shards(lambda x, *args, **kwargs: take(x, dim, start, length))
        move = plan_row_exchange(name, context.mesh, axes, dim, [shape[dim]], [len(rows)], rows)

        def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return mark_copy(move(x), name, _key(dim, rows)) if is_view else move(x)

        return run

    out = Out(dims, replace_dim(shape, dim, len(rows)))
    return Spec(
        [(input, dims)],
        [out],
        linear=[(0,)],
        lower=lower,
        positions=(),
        recut=whole_pieces(dims[dim], [rows]),
        is_view=is_view,
    )


@rule("select", inplace=False)
def select(input: torch.Tensor, dim: int, index: Any) -> Spec | None:
    if not isinstance(index, int) or isinstance(dim, str):
        return None
    at = normalize_dim(dim, input.dim())
    size = input.shape[at]
    if not -size <= index < size:
        raise IndexError(f"select(): index {index} out of range for a dim of size {size}")
    return one_row_spec(input, at, index % size, "select", keep=False)


@rule("narrow", inplace=False)
def narrow(
    input: torch.Tensor, dim: int, start: Any, length: int
) -> Spec | Callable[..., Any] | None:
    if isinstance(start, torch.Tensor):
        return _narrow_from
    return _narrowed(input, dim, start, length, is_view=True)


@rule("narrow_copy", inplace=False)
def narrow_copy(input: torch.Tensor, dim: int, start: Any, length: int) -> Spec | None:
    return _narrowed(input, dim, start, length, is_view=False)


def _narrow_from(input: torch.Tensor, dim: int, start: torch.Tensor, length: int) -> torch.Tensor:
    if start.dim() or start.is_floating_point() or start.is_complex() or start.dtype == torch.bool:
        raise RuntimeError("start must be an 0-dim integral Tensor.")
    return torch.narrow(input, dim, int(start), length)


def _narrowed(
    input: torch.Tensor, dim: int, start: Any, length: int, *, is_view: bool
) -> Spec | None:
    if not isinstance(start, int):
        return None
    at = normalize_dim(dim, input.dim())
    size = input.shape[at]
    first = start + size if start < 0 else start
    if length < 0 or not 0 <= first <= first + length <= size:
        raise RuntimeError(f"start ({start}) + length ({length}) exceeds dimension size ({size}).")
    rows = range(first, first + length)
    return part_spec(input, at, rows, "narrow", is_view=is_view)


@rule("slice", inplace=False)
def slice_(
    input: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Spec | None:
    if not isinstance(input, torch.Tensor):
        return None
    if step <= 0:
        raise RuntimeError("slice step must be positive")
    at = normalize_dim(dim, input.dim())
    rows = range(input.shape[at])[slice(start, end, step)]
    return part_spec(input, at, rows, "slice")


# ---- several parts


def parts_spec(input: torch.Tensor, dim: int, parts: Sequence[range], name: str) -> Spec:
    """Return the spec of several parts along a dim."""
    dims, shape = dims_of(input), tuple(input.shape)
    lengths = [len(part) for part in parts]

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        axes = context.axes(dims[dim])
        if not axes:
            return None
        if context.inputs[0].cuts[dim] is not None:
            places = local_places(context, dim, parts)
            return takes_shards(
                lambda x, *args, **kwargs: tuple(x.narrow(dim, *place) for place in places)
            )
        rows = [row for part in parts for row in part]
        move = plan_row_exchange(name, context.mesh, axes, dim, [shape[dim]], lengths, rows)
        local = [out.local_shape()[dim] for out in context.outputs]

        def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            # The parts own the moved memory and may be written to, so autograd must not see views.
            found = move(x).unsafe_split_with_sizes(local, dim)
            return tuple(
                mark_copy(each, name, _key(dim, part))
                for each, part in zip(found, parts, strict=True)
            )

        return run

    outs = [Out(dims, replace_dim(shape, dim, length)) for length in lengths]
    return Spec(
        [(input, dims)],
        outs,
        linear=[(0,)],
        lower=lower,
        positions=(),
        recut=whole_pieces(dims[dim], parts),
        is_view=True,
    )


def _cut(size: int, at: Sequence[int]) -> list[range]:
    """Return the ranges between these places, which follow the rules of slices."""
    bounds = [0, *at, size]
    return [range(size)[start:stop] for start, stop in pairwise(bounds)]


def _by_lengths(size: int, lengths: Sequence[int]) -> list[range]:
    if sum(lengths) != size or min(lengths, default=0) < 0:
        raise RuntimeError(
            f"split_with_sizes expects split_sizes to sum exactly to {size}, got {list(lengths)}"
        )
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    return [range(start, start + length) for start, length in zip(starts, lengths, strict=True)]


def _by_length(size: int, length: int) -> list[range]:
    if length < 0 or (length == 0 and size):
        raise RuntimeError(f"split expects split_size be non-negative, but got {length}")
    return [range(size)[at : at + length] for at in range(0, size, length or 1)] or [range(0)]


# The unsafe_ forms share memory too, but autograd does not know.


@rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", inplace=False)
def split(tensor: Any, sizes: Any = None, dim: int = 0, **kwargs: Any) -> Spec | None:
    # torch has four names for the sizes
    sizes = next(iter(kwargs.values())) if sizes is None else sizes
    if not isinstance(tensor, torch.Tensor) or len(kwargs) > 1:
        return None
    at = normalize_dim(dim, tensor.dim())
    size = tensor.shape[at]
    by = _by_length(size, sizes) if isinstance(sizes, int) else _by_lengths(size, sizes)
    return parts_spec(tensor, at, by, "split")


@rule("chunk", "unsafe_chunk", inplace=False)
def chunk(input: torch.Tensor, chunks: int, dim: int = 0) -> Spec:
    if chunks <= 0:
        raise RuntimeError(f"chunk expects `chunks` to be greater than 0, got: {chunks}")
    at = normalize_dim(dim, input.dim())
    size = input.shape[at]
    parts = _by_length(size, -(-size // chunks)) if size else [range(0)] * chunks
    return parts_spec(input, at, parts, "chunk")


def _tensor_split(input: torch.Tensor, by: Any, at: int, name: str) -> Spec:
    size = input.shape[at]
    if isinstance(by, int):
        if by <= 0:
            raise RuntimeError(f"number of sections must be larger than 0, got {by}")
        small, extra = divmod(size, by)
        return parts_spec(
            input, at, _by_lengths(size, [small + (each < extra) for each in range(by)]), name
        )
    return parts_spec(input, at, _cut(size, by), name)


@rule("tensor_split", inplace=False)
def tensor_split(
    input: torch.Tensor, by: Any = None, dim: int = 0, **by_name: Any
) -> Spec | Callable[..., Any]:
    by = next(iter(by_name.values())) if by is None else by  # torch has three names for it
    if isinstance(by, torch.Tensor):
        return _tensor_split_at
    return _tensor_split(input, by, normalize_dim(dim, input.dim()), "tensor_split")


def _tensor_split_at(input: Any, by: Any = None, dim: int = 0, **by_name: Any) -> Any:
    by = next(iter(by_name.values())) if by is None else by
    if by.dtype != torch.int64 or by.dim() > 1:
        raise RuntimeError(
            "tensor_split expected tensor_indices_or_sections to have dtype of long and at most 1 "
            f"dim, got {by.dtype} and {by.dim()}"
        )
    return torch.tensor_split(input, by.tolist(), dim)


def _split_along(name: str, dim_of: Callable[[int], int]) -> None:
    @rule(name, inplace=False)
    def split_along(
        input: torch.Tensor, by: Any = None, *, indices: Any = None, sections: Any = None
    ) -> Spec | None:
        by = next(each for each in (by, indices, sections) if each is not None)
        at = dim_of(input.dim())
        if at >= input.dim() or (isinstance(by, int) and by and input.shape[at] % by):
            raise RuntimeError(f"torch.{name} cannot cut {tuple(input.shape)} into {by}")
        return _tensor_split(input, by, at, name)


_split_along("hsplit", lambda ndim: 1 if ndim > 1 else 0)
_split_along("vsplit", lambda ndim: 0 if ndim > 1 else ndim)
_split_along("dsplit", lambda ndim: 2)


@rule("unbind", inplace=False)
def unbind(input: torch.Tensor, dim: int = 0) -> Spec:
    at = normalize_dim(dim, input.dim())
    dims = replace_dim(dims_of(input), at, None)
    out = Out(drop_dims(dims, (at,)), drop_dims(input.shape, (at,)))
    size = operator.index(input.shape[at])
    keys = [(*_all(at), row) for row in range(size)]
    return Spec([(input, dims)], [out] * size, linear=[(0,)], is_view=True, keys=keys)
