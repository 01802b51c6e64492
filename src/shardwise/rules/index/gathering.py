"""Lookups along a dim (gather, take, index_select, ...), and searches.

Along dims that an operator does not touch, operands of equal size share a factor. The factor `rows`
is the dim that indices point into: if it is split, each rank contributes the elements that it holds
and zeros for the rest, and the result is the sum. The dims of the indices are free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.core.layout import Layout
from shardwise.rules.helpers.collectives import all_reduce_extreme, all_reduce_sum
from shardwise.rules.helpers.dims import Inputs, drop_dims, replace_dim, unsplit_spec
from shardwise.rules.helpers.local_tensors import pad_to_one_row
from shardwise.rules.index.indexing import locate, look_up, unravel
from shardwise.rules.pointwise.elementwise import tensors_among
from shardwise.rules.registry import rule
from shardwise.rules.spec import Dims, Out, Spec, SplitContext, dims_of, normalize_dim

# ---- lookups


@rule("gather", inplace=False)
def gather(input: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False) -> Any:
    """Look up elements: `result[i, j] = input[index[i, j], j]`."""
    if sparse_grad:
        return None  # a sparse gradient cannot be summed over ranks
    if input.dim() != index.dim() or input.dim() == 0:
        return unsplit_spec([input, index], tuple(index.shape))
    at = normalize_dim(dim, input.dim())
    names = dims_of(index)
    held: Dims = tuple(
        "rows" if each == at else name if input.size(each) == index.size(each) else None
        for each, name in enumerate(names)
    )
    return _lookup([(input, held), (index, names)], Out(names, tuple(index.shape)), at, _gathered)


def _gathered(input: torch.Tensor, dim: int, index: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return torch.gather(input, dim, index)


@rule("take_along_dim", inplace=False)
def take_along_dim(input: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> Any:
    """Look up elements as gather does, with broadcasting."""
    if dim is None:
        if indices.dim() == 1:
            return take(input, indices)
        return unsplit_spec([input, indices], (indices.numel(),))
    if input.dim() != indices.dim() or input.dim() == 0:
        return None
    at = normalize_dim(dim, input.dim())
    sizes = torch.broadcast_shapes(drop_dims(input.shape, (at,)), drop_dims(indices.shape, (at,)))  # type: ignore[no-untyped-call]
    shape = (*sizes[:at], indices.size(at), *sizes[at:])
    names = dims_of(indices)
    held: Dims = tuple(
        "rows" if each == at else name if input.size(each) == shape[each] else None
        for each, name in enumerate(names)
    )
    picks: Dims = tuple(
        name if indices.size(each) == shape[each] else None for each, name in enumerate(names)
    )
    inputs: Inputs = [(input, held), (indices, picks)]
    return _lookup(inputs, Out(names, shape), at, _taken_along, wraps=True)


def _taken_along(input: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    return torch.take_along_dim(input, index, dim)


@rule("index_select", inplace=False)
def index_select(input: torch.Tensor, dim: int, index: torch.Tensor) -> Spec:
    """Look up rows by number."""
    if input.dim() == 0:
        return unsplit_spec([input, index], ())
    at = normalize_dim(dim, input.dim())
    names = dims_of(input)
    picks: Dims = ("picks",) * index.dim()
    result = replace_dim(names, at, "picks" if picks else None)
    shape = replace_dim(input.shape, at, index.numel())
    held = replace_dim(names, at, "rows")
    return _lookup([(input, held), (index, picks)], Out(result, shape), at, _selected)


def _selected(input: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    return input.index_select(dim, index)


def _lookup(
    inputs: Inputs, out: Out, dim: int, run: Callable[..., Any], *, wraps: bool = False
) -> Spec:
    """Return the spec of a lookup in the first input along a dim, by the indices of the second."""
    (_, held), (_, picks) = inputs

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        axes = context.axes("rows")
        boxes = ranges_to_narrow(held, picks, context.inputs[1]) if len(held) == len(picks) else {}
        if not axes and not boxes:
            return None
        if 0 in out.shape:
            axes = ()  # the result is empty: no sum is needed

        def local(*args: Any, **kwargs: Any) -> torch.Tensor:
            source, index = tensors_among(*args, *kwargs.values())
            source = narrow_to(source, boxes)
            if not context.axes("rows"):
                return run(source, dim, index)  # type: ignore[no-any-return]
            found, inside = locate(index, context.inputs[0], dim, wraps=wraps)
            result = run(pad_to_one_row(source, dim), dim, found)
            beside = [1] * (result.dim() - 1 - dim) if inside.dim() == 1 < result.dim() else []
            result = result.masked_fill(~inside.reshape((*inside.shape, *beside)), 0)
            return all_reduce_sum(result, context.mesh, axes)

        return local

    return Spec(inputs, [out], reduces={"rows": "whole"}, linear=[(0,)], lower=lower)


def ranges_to_narrow(
    dims: Dims, leading: Dims, layout: Layout, but: int | None = None
) -> dict[int, tuple[int, int]]:
    """Return the ranges, by dim, to which an operand is narrowed.

    These are dims that are split in the leading operand, and longer or shorter in this one.
    """
    box = layout.box()
    return {
        dim: (box.start[dim], box.stop[dim])
        for dim, (mine, name) in enumerate(zip(dims, leading, strict=True))
        if mine is None and name is not None and layout.shard_order[dim] and dim != but
    }


def narrow_to(
    tensor: torch.Tensor, boxes: dict[int, tuple[int, int]], *, broadcasts: bool = True
) -> torch.Tensor:
    """Narrow an operand to these ranges; dims of size 1 of an operand that broadcasts stay."""
    for dim, (first, end) in boxes.items():
        size = tensor.size(dim)
        if broadcasts and size == 1 < end:
            continue
        first = min(first, size)
        tensor = tensor.narrow(dim, first, min(end, size) - first)
    return tensor


@rule("take", inplace=False)
def take(input: torch.Tensor, index: torch.Tensor) -> Spec:
    """Look up elements of the flattened input."""
    held, picks = dims_of(input, "rows"), dims_of(index)

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        axes = context.axes(*held)
        if not axes:
            return None
        split = [dim for dim, name in enumerate(held) if context.axes(name)]
        shape = tuple(input.shape)

        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            source, index = tensors_among(*args, *kwargs.values())
            found = look_up(source, unravel(index, shape), context.inputs[0], split)
            return all_reduce_sum(found, context.mesh, axes)

        return run

    return Spec(
        [(input, held), (index, picks)],
        [Out(picks, tuple(index.shape))],
        reduces={name: "whole" for name in held if name},
        linear=[(0,)],
        lower=lower,
    )


# ---- searches


@rule("searchsorted", inplace=False)
def searchsorted(
    sorted_sequence: torch.Tensor, input: Any, *, sorter: torch.Tensor | None = None, **kwargs: Any
) -> Spec:
    """Find where values belong in a sorted sequence.

    If the sequence is split, each rank searches its shard, and the positions are summed.
    """
    ndim = sorted_sequence.dim()
    batch = dims_of(sorted_sequence)[:-1]
    sequence: Dims = (*batch, "sequence" if sorter is None else None)
    inputs: Inputs = [(sorted_sequence, sequence)]
    found: Dims = ()
    shape: tuple[int, ...] = ()
    if isinstance(input, torch.Tensor):
        found = (*batch, "values") if ndim > 1 else dims_of(input, "values")
        shape = tuple(input.shape)
        inputs.append((input, found))
    if sorter is not None:
        inputs.append((sorter, sequence))
    return Spec(inputs, [Out(found, shape)], reduces={"sequence": "sum"})


@rule("bucketize", inplace=False)
def bucketize(input: Any, boundaries: torch.Tensor, **kwargs: Any) -> Spec:
    """Find where values belong among the boundaries, which may be split, as for `searchsorted`."""
    if boundaries.dim() != 1:
        raise RuntimeError(
            f"boundaries tensor must be 1 dimension, but got dim({boundaries.dim()})"
        )
    found = dims_of(input) if isinstance(input, torch.Tensor) else ()
    shape = tuple(input.shape) if isinstance(input, torch.Tensor) else ()
    inputs: Inputs = [(input, found)] if isinstance(input, torch.Tensor) else []
    inputs.append((boundaries, ("boundaries",)))
    return Spec(inputs, [Out(found, shape)], reduces={"boundaries": "sum"})


@rule("isin", inplace=False)
def isin(
    elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False
) -> Spec:
    """Test membership: an element is a member if some rank has it among its test elements."""
    found = dims_of(elements) if isinstance(elements, torch.Tensor) else ()
    shape = tuple(elements.shape) if isinstance(elements, torch.Tensor) else ()
    inputs: Inputs = [(elements, found)] if isinstance(elements, torch.Tensor) else []
    tested: Dims = ()
    if isinstance(test_elements, torch.Tensor):
        tested = dims_of(test_elements, "tested")
        inputs.append((test_elements, tested))

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        axes = context.axes(*tested)
        if not axes:
            return None

        def run(elements: Any, test_elements: Any, **kwargs: Any) -> torch.Tensor:
            result = torch.isin(elements, test_elements).to(torch.uint8)
            return all_reduce_extreme(result, context.mesh, axes, "max") != invert

        return run

    return Spec(
        inputs,
        [Out(found, shape)],
        reduces={name: "whole" for name in tested if name},
        lower=lower,
    )
