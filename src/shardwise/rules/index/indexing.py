"""Reading by index: `x[key]`.

Indexing has two steps (`shardwise.rules.helpers.index_key`): the basic part of a key gives a view,
then the tensors of the key select elements of it. A slice of a split dim stays split: rows move
between ranks. A single row, and elements selected by tensors, are a sum over ranks: each
contributes what it holds, and zeros for the rest. Nothing is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.core.cut import Cut
from shardwise.core.layout import Layout
from shardwise.dtensor.tensor import DTensor
from shardwise.rules.helpers.collectives import all_reduce_sum
from shardwise.rules.helpers.dims import Inputs, broadcast_dims, out_of_range
from shardwise.rules.helpers.index_key import (
    ALL,
    Key,
    Pick,
    as_replicated,
    gather_whole,
    is_simple,
    local_region,
    mesh_of,
    parse_key,
    region,
)
from shardwise.rules.helpers.local_tensors import pad, pad_to_one_row
from shardwise.rules.helpers.row_exchange import mark_copy, plan_row_exchange
from shardwise.rules.registry import Function, composed, handler, rule
from shardwise.rules.shape.splitting import whole_pieces
from shardwise.rules.spec import Out, Spec, SplitContext, dims_of

# ---- parts of lookups in a split dim


def locate(
    index: torch.Tensor, layout: Layout, dim: int, *, wraps: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Translate global indices to places in this rank's shard; also return which of them it holds.

    The place of an index that the rank does not hold is 0.

    Arguments:
        wraps: whether negative indices count from the end; otherwise they are refused.
    """
    size = layout.shape[dim]
    lowest = -size if wraps else 0
    check_bounds(index, lowest, size)
    if wraps:
        index = torch.where(index < 0, index + size, index)
    start, stop = layout.range(dim)
    inside = (index >= start) & (index < stop)
    return (index - start).masked_fill(~inside, 0), inside


def check_bounds(index: torch.Tensor, lowest: int, size: int) -> None:
    """Refuse indices that are out of range."""
    fine = ((index >= lowest) & (index < size)).all()
    error = out_of_range(lowest, size)
    try:
        torch._assert_async(fine, str(error))
    except RuntimeError:
        raise error from None


def unravel(index: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return the coordinates of indices into a flattened tensor."""
    count = math.prod(shape)
    check_bounds(index, -count, count)
    index = torch.where(index < 0, index + count, index)
    result = []
    for size in reversed(shape):
        result.append(index % max(size, 1))
        index = torch.div(index, max(size, 1), rounding_mode="floor")
    return tuple(reversed(result))


# ---- the basic part of a key

BASIC = Function("__getitem__", lambda input, key: input[key])


@rule(BASIC)
def basic(input: torch.Tensor, key: Any) -> Spec:
    """Return the spec of an index of ints, slices, None and Ellipsis: a view."""
    where = region(key, input)
    single = [name for name in where.parts if name not in where.rows]

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        if not context.axes(*where.parts):
            return None
        local = local_region(where, context, but_long=True)
        axes = context.axes(*single) if 0 not in where.shape else ()
        moves = {at: _rows_moved(context, *taken, at) for at, taken in local.whole.items()}

        def run(input: torch.Tensor, key: Any) -> torch.Tensor:
            result = input[local.key]
            for move in moves.values():
                result = move(result)
            for dim, (before, _, after) in local.spans.items():
                result = pad(result, {dim: (before, after)})
            result = all_reduce_sum(result, context.mesh, axes)
            for dim in reversed(local.dropped):
                result = result.select(dim, 0)
            return mark_copy(result, "__getitem__", key) if local.severed else result

        return run

    def recut(factor: str, number: int, cut: Cut, counts: tuple[int, ...]) -> Cut | None:
        pick = taken[where.whole.index(factor)]
        return cut if pick.is_all else whole_pieces(factor, [pick.rows])(factor, 0, cut, counts)

    taken = [pick for pick in where.picks if pick is not None]

    return Spec(
        [(input, where.whole)],
        [Out(where.rows, where.shape)],
        reduces=dict.fromkeys(single, "whole"),
        linear=[(0,)],
        lower=lower,
        positions=single,
        recut=recut,
        is_view=True,
    )


def _rows_moved(
    context: SplitContext, dim: int, pick: Pick, at: int
) -> Callable[..., torch.Tensor]:
    """Plan the exchange of a part of a split dim, which is dim `at` of the result."""
    sizes = [context.inputs[0].shape[dim]], [pick.count]
    return plan_row_exchange(
        "__getitem__", context.mesh, context.axes(f"d{dim}"), at, *sizes, pick.rows
    )


# ---- the tensors of a key

Indices = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class IndexedDims:
    """The dims of a result of index tensors: the broadcast dims of the indices stand together."""

    at: int
    """The first dim of the indices in the result."""
    common: tuple[int, ...]
    """The shape that the indices broadcast to."""
    rest: tuple[int, ...]
    """The dims of the tensor that have no index."""

    def arranged(self, rest: Sequence[Any], common: Sequence[Any]) -> tuple[Any, ...]:
        """Order values for the other dims and for the dims of the indices as in the result."""
        return (*rest[: self.at], *common, *rest[self.at :])


def indexed_dims(ndim: int, indices: Indices) -> IndexedDims:
    """Return the dims of the result of these index tensors."""
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    together = dims == list(range(dims[0], dims[-1] + 1))
    shapes = [tuple(each.shape) for each in indices if each is not None]
    common = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    rest = tuple(dim for dim in range(ndim) if dim not in dims)
    return IndexedDims(dims[0] if together else 0, tuple(common), rest)


def locate_all(
    local: torch.Tensor, indices: Indices, layout: Layout, dims: Sequence[int]
) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """Translate indices to places in this rank's shard, for the split dims; and which it holds."""
    result = list(indices)
    common = indexed_dims(local.dim(), indices).common
    inside = torch.ones((), dtype=torch.bool, device=local.device)
    for dim in dims:
        index = result[dim]
        assert index is not None, "it has an index"
        result[dim], found = locate(index, layout, dim)
        inside = inside & found
    return result, inside.expand(common)


def look_up(
    local: torch.Tensor, indices: Indices, layout: Layout, dims: Sequence[int]
) -> torch.Tensor:
    """Return this rank's elements at global indices; 0 for elements of other ranks."""
    where = indexed_dims(local.dim(), indices)
    found, inside = locate_all(local, indices, layout, dims)
    for dim in dims:
        local = pad_to_one_row(local, dim)
    result = local[tuple(ALL if each is None else each for each in found)]
    trailing = len(where.rest) - where.at
    return result.masked_fill(~inside.reshape((*inside.shape, *[1] * trailing)), 0)


ADVANCED = Function(
    "__getitem__",
    lambda input, indices: input[tuple(ALL if each is None else each for each in indices)],
)


@rule(ADVANCED)
def advanced(input: torch.Tensor, indices: Indices) -> Spec:
    """Return the spec of an index of integer tensors, one or None for each dim: a copy."""
    where = indexed_dims(input.dim(), indices)
    names = dims_of(input)
    common = [f"b{dim}" for dim in range(len(where.common))]
    inputs: Inputs = [(input, names)]
    for index in indices:
        if index is not None:
            inputs.append((index, broadcast_dims(index, common, where.common)))
    indexed = [dim for dim in range(input.dim()) if dim not in where.rest]
    shape = where.arranged([input.shape[dim] for dim in where.rest], where.common)

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        split = [dim for dim in indexed if context.axes(names[dim])]
        if not split:
            return None
        axes = context.axes(*(names[dim] for dim in split)) if 0 not in shape else ()
        return lambda input, indices: all_reduce_sum(
            look_up(input, indices, context.inputs[0], split), context.mesh, axes
        )

    return Spec(
        inputs,
        [Out(where.arranged([names[dim] for dim in where.rest], common), shape)],
        reduces={f"d{dim}": "whole" for dim in indexed},
        linear=[(0,)],
        lower=lower,
        positions=[f"d{dim}" for dim in indexed],
    )


# ---- a whole key


@handler(torch.Tensor.__getitem__)
def getitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return `x[key]`."""
    input, key = args
    if isinstance(input, DTensor) and is_simple(key):
        return BASIC.dispatched(input, key)
    return _by_parts(input, parse_key(input, key, mesh_of(input, key)))


def _by_parts(input: torch.Tensor, parts: Key) -> Any:
    if parts.basic is not None or not parts.indices:
        basic = () if parts.basic is None else parts.basic
        input = BASIC.dispatched(input, basic) if isinstance(input, DTensor) else input[basic]
    if not parts.indices or (not isinstance(input, DTensor) and mesh_of(parts.indices) is None):
        return input
    return ADVANCED.dispatched(input, parts.indices)


@handler(torch.ops.aten.index, torch.ops.aten.index.Tensor, "_unsafe_index")
def aten_index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return `x[key]` as aten takes it: a tensor or None for each dim."""
    input, indices = (*args, *kwargs.values())
    key = tuple(ALL if each is None else each for each in indices)
    return _by_parts(input, parse_key(input, key, mesh_of(input, key), only_tensors=True))


@composed("_unsafe_masked_index")
def masked_index(
    input: torch.Tensor, mask: torch.Tensor, indices: Sequence[Any], fill: Any
) -> torch.Tensor:
    """Return `x[indices]` where a mask is true; other indices may be out of bounds."""
    if input.numel():
        return input[clamp_indices(input, indices)].masked_fill(mask.logical_not(), fill)
    where = indexed_dims(input.dim(), indices)
    return input.new_full(
        where.arranged([input.shape[dim] for dim in where.rest], where.common), fill
    )


def clamp_indices(input: torch.Tensor, indices: Sequence[Any]) -> tuple[Any, ...]:
    """Clamp indices to the bounds of the dims; return them as a key."""
    sizes = zip(indices, input.shape, strict=False)
    return tuple(ALL if each is None else each.clamp(-size, size - 1) for each, size in sizes)


# ---- selection by a mask or by nonzero elements


@composed("masked_select")
def masked_select(input: torch.Tensor, mask: torch.Tensor) -> Any:
    """Return `x[mask]`, with broadcasting."""
    shape = torch.broadcast_shapes(tuple(input.shape), tuple(mask.shape))  # type: ignore[no-untyped-call]
    return input.expand(shape)[mask.expand(shape)]


@composed("nonzero", "argwhere")
def nonzero(input: DTensor, as_tuple: bool = False) -> Any:
    """Return the places of nonzero elements on every rank; one byte per element is gathered."""
    mesh = input._layout.mesh
    with torch.no_grad():
        mask: Any = gather_whole(input != 0, "nonzero")
        found = mask.nonzero(as_tuple=as_tuple)
    if as_tuple:
        return tuple(as_replicated(each, mesh) for each in found)
    return as_replicated(found, mesh)


@composed("nonzero_static")
def nonzero_static(input: DTensor, *, size: int, fill_value: int = -1) -> Any:
    """Return the places of nonzero elements, as a list of given length."""
    found = nonzero(input)
    return F.pad(found, (0, 0, 0, size - len(found)), value=fill_value)
