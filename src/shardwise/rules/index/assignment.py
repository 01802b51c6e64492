"""Writing by index: `x[key] = value`, index_put, put_, and copies with a part overwritten.

In place; the target keeps its layout.

Each rank writes the elements of its shard, even if there are none: a value that requires grad must
be in the graph of every rank, as its gradient is summed over the ranks. Writing is jointly linear
in target and value, so a target with a pending sum takes the value as a pending sum too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import torch

from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.dtensor.composite import write_to_plain
from shardwise.dtensor.tensor import DTensor, unwrap, wrap
from shardwise.dtensor.view_copy import is_current_copy
from shardwise.rules.helpers.dims import Inputs, broadcast_dims
from shardwise.rules.helpers.index_key import (
    ALL,
    Key,
    Region,
    as_replicated,
    gather_whole,
    is_mask,
    is_simple,
    local_region,
    mesh_of,
    parse_key,
    picks,
    region,
)
from shardwise.rules.index.indexing import (
    BASIC,
    Indices,
    check_bounds,
    clamp_indices,
    indexed_dims,
    locate_all,
    unravel,
)
from shardwise.rules.registry import Function, OpInfo, add_op_info, composed, handler
from shardwise.rules.shape.strides import check_source
from shardwise.rules.spec import Dims, Out, Spec, SplitContext, dims_of, normalize_dim


def writer(name: str, run: Callable[..., None]) -> Callable[[Callable[..., Spec]], Function]:
    """Return a decorator that turns a rule into a function that writes to its first argument."""
    function = Function(name, run)

    def write_to_copy(target: DTensor, *args: Any) -> DTensor:
        # For example a pending max: its contributions cannot be written to.
        result = as_replicated(gather_whole(target, name).clone(), target._layout.mesh)
        function.dispatched(result, *args)
        return result

    def register(made: Callable[..., Spec]) -> Function:
        def writes(*args: Any, **kwargs: Any) -> Spec:
            return dataclasses.replace(made(*args, **kwargs), writes=True)

        add_op_info(function, OpInfo(name, writes, outplace=write_to_copy))
        return function

    return register


# ---- by a basic key


def _assign(target: torch.Tensor, key: Any, value: Any) -> None:
    target[key] = value


@writer("__setitem__", _assign)
def ASSIGN(target: torch.Tensor, key: Any, value: torch.Tensor) -> Spec:  # noqa: N802
    """Assign by ints, slices, None and Ellipsis."""
    where = region(key, target)

    def lower(context: SplitContext) -> Callable[..., None] | None:
        if not context.axes(*where.parts):
            return None
        local = local_region(where, context)

        def run(target: torch.Tensor, key: Any, value: torch.Tensor) -> None:
            value = _of_rank(value, len(where.dims))
            for dim in local.dropped:
                value = value.unsqueeze(dim)
            for dim, (before, length, _) in local.spans.items():
                if value.size(dim) != 1:
                    value = value.narrow(dim, before, length)
            target[local.key] = value

        return run

    return Spec(
        [(target, where.whole), (value, _fitted(value, where.dims, where.shape))],
        [Out(where.whole, tuple(target.shape))],
        linear=[(0, 1)],
        lower=lower,
        positions=where.parts,
    )


def _fitted(value: torch.Tensor, names: Sequence[str | None], shape: Sequence[int]) -> Dims:
    """Return the factors of a value that is written to a region with these factors and sizes."""
    sizes = list(value.shape)
    while len(sizes) > len(shape) and sizes[0] == 1:
        sizes.pop(0)
    ends = zip(reversed(sizes), reversed(shape), strict=False)
    if len(sizes) > len(shape) or any(size not in (1, wanted) for size, wanted in ends):
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(value.shape)} cannot be broadcast to "
            f"{list(shape)}"
        )
    return broadcast_dims(value, names, shape)


def _of_rank(value: torch.Tensor, ndim: int) -> torch.Tensor:
    """Add leading dims to a value until it has `ndim` dims."""
    shape = tuple(value.shape)
    extra = len(shape) - ndim
    return value.reshape(shape[extra:] if extra > 0 else (1,) * -extra + shape)


# ---- by a mask


@writer("__setitem__", _assign)
def FILL(target: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> Spec:  # noqa: N802
    """Assign one value to all places where a mask is true."""
    shape = tuple(target.shape)
    if tuple(mask.shape) != shape[: mask.dim()]:
        raise IndexError(
            f"The shape of the mask {list(mask.shape)} at index 0 does not match the shape of the "
            f"indexed tensor {list(shape)} at index 0"
        )
    dims = dims_of(target)
    rest = [None, *dims[mask.dim() :]]  # the first dim of the value runs along the places
    return Spec(
        [
            (target, dims),
            (mask, dims[: mask.dim()]),
            (value, _fitted(value, rest, (1, *shape[mask.dim() :]))),
        ],
        [Out(dims, shape)],
        linear=[(0, 2)],
    )


def _fills(target: torch.Tensor, key: Any, value: torch.Tensor) -> bool:
    """Return whether a key is one mask and the value is the same for all its places."""
    if not is_mask(key):
        return False
    rest = target.dim() - key.dim()
    return key.dim() > 0 and (value.dim() <= rest or (value.dim() == rest + 1 and len(value) == 1))


# ---- by tensors


def _put(target: torch.Tensor, indices: Indices, values: torch.Tensor, accumulate: bool) -> None:
    if accumulate:
        # Call the operator, as the method does not accept None for a dim.
        torch.ops.aten.index_put_.default(target, list(indices), values, True)
    else:
        target[tuple(ALL if each is None else each for each in indices)] = values


@writer("index_put_", _put)
def PUT(  # noqa: N802
    target: torch.Tensor, indices: Indices, values: torch.Tensor, accumulate: bool
) -> Spec:
    """Assign (or add) by tensors of integers, one or None for each dim."""
    where = indexed_dims(target.dim(), indices)
    names = dims_of(target)
    common = [None] * len(where.common)
    shape = where.arranged([target.shape[dim] for dim in where.rest], where.common)
    result = where.arranged([names[dim] for dim in where.rest], common)
    inputs: Inputs = [(target, names)]
    inputs += [(each, (None,) * each.dim()) for each in indices if each is not None]
    inputs.append((values, _fitted(values, result, shape)))

    def lower(context: SplitContext) -> Callable[..., None] | None:
        dims = [dim for dim in range(target.dim()) if dim not in where.rest]
        split = [dim for dim in dims if context.axes(names[dim])]
        if not split:
            return None

        def run(
            target: torch.Tensor, indices: Indices, values: torch.Tensor, accumulate: bool
        ) -> None:
            found, inside = locate_all(target, indices, context.inputs[0], split)
            sizes = where.arranged([target.size(dim) for dim in where.rest], where.common)
            values = _of_rank(values, len(sizes)).expand(sizes)[(ALL,) * where.at + (inside,)]
            kept = [None if each is None else each.expand(where.common)[inside] for each in found]
            _put(target, kept, values, accumulate)

        return run

    return Spec(
        inputs,
        [Out(names, tuple(target.shape))],
        linear=[(0, len(inputs) - 1)],
        lower=lower,
    )


def coordinates(target: torch.Tensor, key: Key) -> tuple[torch.Tensor, ...]:
    """Convert a key of slices, integers and tensors to one index tensor per dim.

    The index tensors broadcast together.
    """
    taken = picks(key.basic, tuple(target.shape))
    sizes = [1 if pick is None else pick.count for pick in taken if pick is None or not pick.drops]
    where = indexed_dims(len(sizes), key.indices)
    ndim = len(where.rest) + len(where.common)
    places = where.arranged(where.rest, [None] * len(where.common))
    result = []
    dim = 0
    for pick in taken:
        if pick is not None and pick.drops:
            result.append(torch.tensor(pick.start))
            continue
        index = key.indices[dim] if dim < len(key.indices) else None
        if index is None:
            at = places.index(dim)
            index = torch.arange(sizes[dim]).reshape([-1 if e == at else 1 for e in range(ndim)])
        else:
            index = gather_whole(index, "__setitem__")
            check_bounds(index, -sizes[dim], sizes[dim])
            index = torch.where(index < 0, index + sizes[dim], index)
            index = index.reshape(*index.shape, *[1] * (len(where.rest) - where.at))
        if pick is not None:
            result.append(pick.start + index * pick.step)
        dim += 1
    return tuple(result)


# ---- the functions of torch


@handler(torch.Tensor.__setitem__)
def setitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Do `x[key] = value`."""
    target, key, value = args
    if not isinstance(target, DTensor):
        write_to_plain("__setitem__", func, *args)
        return
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, Number):
            raise TypeError(f"can't assign a {type(value).__name__} to a {target.type()}")
        # As a tensor: a number would be part of the cache key, and cannot be a pending sum.
        value = torch.tensor(value, dtype=target.dtype, device=target.device)
    if isinstance(key, tuple) and len(key) == 1:
        key = key[0]
    if is_current_copy(
        value, target, key
    ):  # `x[key] += 1` ends with this, and has written back already
        return
    if is_simple(key):
        ASSIGN.dispatched(target, key, value)
    elif _fills(target, key, value):
        FILL.dispatched(target, key, value)
    else:
        _set(target, parse_key(target, key, target._layout.mesh), value)


def _set(target: DTensor, key: Key, value: torch.Tensor) -> None:
    mesh = target._layout.mesh
    if not key.indices:
        ASSIGN.dispatched(target, key.basic or (), value)
    elif key.basic is None:
        PUT.dispatched(target, key.indices, value, False)
    elif _is_view(region(key.basic, target), target._layout):
        PUT.dispatched(BASIC.dispatched(target, key.basic), key.indices, value, False)
    else:
        indices = tuple(as_replicated(each, mesh) for each in coordinates(target, key))
        PUT.dispatched(target, indices, value, False)


def _is_view(where: Region, layout: Layout) -> bool:
    """Return whether the region is a view of each rank's shard."""
    split = {f"d{dim}" for dim, axes in enumerate(layout.shard_order) if axes}
    return not split & set(where.parts)


@composed("index_put_")
def index_put_(
    input: Any, indices: Sequence[Any], values: torch.Tensor, accumulate: bool = False
) -> Any:
    """Run `index_put_`: indices are tensors, or None for a dim."""
    if not isinstance(input, DTensor):
        return write_to_plain(
            "index_put_", torch.Tensor.index_put_, input, tuple(indices), values, accumulate
        )
    masks = [each for each in indices if is_mask(each) and each.dim() == 0]  # select all or nothing
    if not all(map(bool, masks)):
        return input
    rest = [each for each in indices if not (is_mask(each) and each.dim() == 0)]
    key = tuple(ALL if each is None else each for each in rest)
    if masks and not key:  # all elements are selected
        return input.add_(values) if accumulate else input.copy_(values)
    parts = parse_key(input, key, input._layout.mesh, only_tensors=True)
    PUT.dispatched(input, parts.indices, values, bool(accumulate))
    return input


@composed("index_put", "_unsafe_index_put")
def index_put(
    input: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, accumulate: bool = False
) -> Any:
    """Run `index_put_` on a copy."""
    return index_put_(copy_of(input, mesh_of(input, indices, values)), indices, values, accumulate)


@composed("_unsafe_masked_index_put_accumulate")
def masked_index_put(
    input: torch.Tensor, mask: torch.Tensor, indices: Sequence[Any], values: torch.Tensor
) -> Any:
    """Add to a copy where a mask is true; other indices may be out of bounds."""
    if not input.numel():
        return copy_of(input, mesh_of(input, mask, indices, values))
    key = [None if each is ALL else each for each in clamp_indices(input, indices)]
    return index_put(input, key, values.masked_fill(mask.logical_not(), 0), accumulate=True)


@composed("put_")
def put_(input: Any, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False) -> Any:
    """Run `put_`: the indices are of the flattened tensor."""
    if not isinstance(input, DTensor):
        return write_to_plain("put_", torch.Tensor.put_, input, index, source, accumulate)
    mesh = input._layout.mesh
    found = unravel(gather_whole(index, "put_"), input._layout.shape)
    values = gather_whole(source, "put_").reshape(index.shape)
    values = as_replicated(
        values.view_as(values), mesh
    )  # an alias, as the tensor may be the user's own
    indices = tuple(as_replicated(each, mesh) for each in found)
    if indices:
        PUT.dispatched(input, indices, values, bool(accumulate))
    elif index.numel() and accumulate:  # a 0-d tensor has one element
        input.add_(values.sum())
    elif index.numel():
        input.copy_(values.reshape(-1)[-1])
    return input


@composed("put")
def put(
    input: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False
) -> Any:
    """Run `put_` on a copy."""
    return put_(copy_of(input, mesh_of(input, index, source)), index, source, accumulate)


def copy_of(input: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a copy that can be written to; the copy of a plain tensor is replicated."""
    if isinstance(input, DTensor):
        return wrap(unwrap(input).clone(), input._layout)
    return as_replicated(input.clone(), mesh)


# ---- copies with a view overwritten


@composed("copy")
def copy(input: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> Any:
    """Return a copy of the source in the shape and dtype of the input, with the source's layout."""
    mesh = mesh_of(input, src)
    source = src if isinstance(src, DTensor) else as_replicated(src, mesh)
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
    indices[row] = as_replicated(places + max(0, -offset), mesh)
    indices[column] = as_replicated(places + max(0, offset), mesh)
    first, last = min(row, column), max(row, column)
    result = copy_of(input, mesh)
    # As in torch, indexed dims stay in place if they are adjacent, and come first otherwise.
    values = src.movedim(-1, first if last == first + 1 else 0)
    PUT.dispatched(result, tuple(indices[: last + 1]), values, False)
    return result
