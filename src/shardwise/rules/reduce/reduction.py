"""Reductions over any dims: sum, mean, prod, all, any and others.

If a reduced dim is split, a linear operator leaves a pending sum. For other operators the small
local results are reduced over the ranks at once, and the result is replicated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.rules.helpers.collectives import all_gather_stack, all_reduce_extreme, all_reduce_sum
from shardwise.rules.helpers.dims import as_dims, as_sizes, drop_dims, replace_dim, shapes_along
from shardwise.rules.helpers.local_tensors import autocast_wide_dtype, keeps_sums, wide_dtype
from shardwise.rules.pointwise.elementwise import broadcast_spec
from shardwise.rules.registry import composed, input_of, rule, with_synonyms
from shardwise.rules.spec import Dims, Out, Spec, SplitContext, dims_of

Body = Callable[[torch.Tensor, "ReducedDims"], Any]
"""A function that runs on the local tensor if a reduced dim is split."""


@dataclass(frozen=True)
class ReducedDims:
    """The reduced dims of a call, of which some are split; lowerings get it."""

    layout: Layout
    """The layout of the input."""
    axes: tuple[int, ...]
    """The axes that split the reduced dims."""
    dims: tuple[int, ...]
    keepdim: bool

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the input."""
        return self.layout.mesh

    @functools.cached_property
    def start(self) -> tuple[int, ...]:
        """The first index of this rank's shard along each reduced dim."""
        dims = range(self.layout.ndim)
        return tuple(self.layout.range(dim)[0] if dim in self.dims else 0 for dim in dims)

    @functools.cached_property
    def count(self) -> int:
        """The number of elements of the global tensor that are reduced to one."""
        return math.prod(self.layout.shape[dim] for dim in self.dims)

    @functools.cached_property
    def counts(self) -> list[int]:
        """The number of these elements on each rank, in the order of `all_gather_stack`."""
        return [
            math.prod(shape[dim] for dim in self.dims)
            for shape in shapes_along(self.layout, self.axes)
        ]

    def total(self, local: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks; the result is replicated; differentiable."""
        return all_reduce_sum(local, self.mesh, self.axes)

    def extreme(self, local: torch.Tensor, op: str) -> torch.Tensor:
        """Take the maximum or minimum over the ranks; the result is replicated; no gradient."""
        return all_reduce_extreme(local.contiguous(), self.mesh, self.axes, op)

    def stacked(self, local: torch.Tensor) -> torch.Tensor:
        """Gather the tensors of the ranks along a new first dim; differentiable."""
        return all_gather_stack(local, self.mesh, self.axes)

    def kept(self, result: torch.Tensor) -> torch.Tensor:
        """Drop the reduced dims of a result that still has them, unless `keepdim` is set."""
        return result if self.keepdim else result.squeeze(self.dims)


def reduction_spec(
    input: torch.Tensor,
    dim: Any,
    keepdim: bool,
    how: str,
    body: Body | None = None,
    *,
    outputs: int = 1,
    linear: bool = False,
    warns: bool = False,
    by_index: bool = False,
) -> Spec:
    """Return the spec of a reduction over some dims.

    Arguments:
        how: the reduction that is pending on the results if a reduced dim is split; "whole" for
            none.
        body: the function that then runs in place of the operator.
        outputs: the number of results, all of one shape.
        linear: whether pending sums flow through.
        warns: whether torch warns about an empty shard; the body runs on it then.
        by_index: whether the body must know which indices of the reduced dims this rank holds.
    """
    dims = as_dims(dim, input.dim())
    names, shape = dims_of(input), tuple(input.shape)
    out = Out(drop_dims(names, dims, keepdim, None), drop_dims(shape, dims, keepdim, 1))

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        over = reduced_dims(context, names, dims, keepdim)
        is_empty = 0 in context.inputs[0].local_shape()
        if body is None or not (over.axes or (warns and is_empty)):
            return None
        return lambda *args, **kwargs: body(input_of(args, kwargs), over)

    split = reduces_as(names, dims, how)
    return Spec(
        [(input, names)],
        [out] * outputs,
        reduces=split,
        linear=[(0,)] if linear else (),
        lower=lower,
        positions=[*split] if by_index else (),
    )


def reduces_as(names: Dims, dims: Sequence[int], how: str) -> dict[str, str]:
    """Return the reduction that is pending if one of these dims is split, by factor."""
    return {name: how for each in dims if (name := names[each]) is not None}


def reduced_dims(
    context: SplitContext, names: Dims, dims: tuple[int, ...], keepdim: bool
) -> ReducedDims:
    """Return the reduced dims of a call's first input, for its lowering."""
    axes = context.axes(*(names[each] for each in dims))
    return ReducedDims(context.inputs[0], axes, dims, keepdim)


# ---- the rules


@rule("sum")
@with_synonyms
def sum_(input: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Spec:
    return reduction_spec(input, dim, keepdim, "sum", linear=keeps_sums(dtype))


@rule("nansum")
@with_synonyms
def nansum(
    input: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Spec:
    return reduction_spec(input, dim, keepdim, "sum")


@rule("count_nonzero")
@with_synonyms
def count_nonzero(input: torch.Tensor, dim: Any = None) -> Spec:
    return reduction_spec(input, dim, False, "sum")


@rule("mean")
@with_synonyms
def mean(input: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Spec:
    def body(local: torch.Tensor, over: ReducedDims) -> torch.Tensor:
        kind = dtype or local.dtype
        if not keeps_sums(kind):
            return torch.mean(local, over.dims, dtype=dtype)  # raises torch's own error
        summed = torch.sum(local, over.dims, over.keepdim, dtype=wide_dtype(kind))
        return (summed / over.count).to(kind)

    return reduction_spec(input, dim, keepdim, "sum", body, linear=keeps_sums(dtype))


@rule("nanmean")
@with_synonyms
def nanmean(
    input: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Spec:
    def body(local: torch.Tensor, over: ReducedDims) -> torch.Tensor:
        kind = dtype or local.dtype
        if not keeps_sums(kind):
            return torch.nanmean(local, over.dims, dtype=dtype)
        counted = over.total(local.isnan().logical_not_().sum(over.dims, over.keepdim))
        summed = torch.nansum(local, over.dims, over.keepdim, dtype=wide_dtype(kind))
        return (summed / counted).to(kind)

    return reduction_spec(input, dim, keepdim, "sum", body)


@rule("prod")
@with_synonyms
def prod(input: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Spec:
    # Multiply the products of the ranks: torch's gradient of both steps is right for zeros, which
    # the gradient of a pending product would not be.
    def body(local: torch.Tensor, over: ReducedDims) -> torch.Tensor:
        given = () if dim is None else (dim, keepdim)
        return over.stacked(torch.prod(local, *given, dtype=dtype)).prod(0, dtype=dtype)

    return reduction_spec(input, dim, keepdim, "whole", body)


def _verdict(function: Callable[..., torch.Tensor], op: str) -> Callable[..., Any]:
    def made(input: torch.Tensor, dim: Any = None, keepdim: bool = False) -> Spec:
        def body(local: torch.Tensor, over: ReducedDims) -> torch.Tensor:
            return over.extreme(function(local, over.dims, over.keepdim), op)

        if isinstance(dim, list | tuple) and not dim:
            return broadcast_spec([input])  # for all and any, dim=() does not mean all dims
        return reduction_spec(input, dim, keepdim, "whole", body)

    return with_synonyms(made)


rule("all")(_verdict(torch.all, "min"))
rule("any")(_verdict(torch.any, "max"))


@rule("trace")
@with_synonyms
def trace(input: torch.Tensor) -> Spec:
    def body(local: torch.Tensor, over: ReducedDims) -> torch.Tensor:
        row, column = over.start
        return local.to(autocast_wide_dtype(local)).diagonal(row - column).sum()

    if input.dim() != 2:
        raise RuntimeError(f"trace: expected a matrix, but got tensor with dim {input.dim()}")
    return reduction_spec(input, None, False, "sum", body, linear=True, by_index=True)


@composed("sum_to_size")
def sum_to_size(input: torch.Tensor, *sizes: Any, size: Any = None) -> torch.Tensor:
    size = as_sizes(sizes) if size is None else tuple(size)
    if not size:
        return input.sum()
    extra = input.dim() - len(size)
    if extra < 0 or any(
        wanted not in (1, have) for wanted, have in zip(size, input.shape[extra:], strict=True)
    ):
        raise RuntimeError(
            f"size {{{list(size)}}} is not expandable to size {{{list(input.shape)}}}."
        )
    kept = [extra + at for at, wanted in enumerate(size) if wanted != input.shape[extra + at]]
    result: torch.Tensor = input.sum(kept, keepdim=True) if kept else input
    return result.sum(tuple(range(extra))) if extra else result


# ---- other reductions


@rule("hash_tensor")
@with_synonyms
def hash_tensor(input: torch.Tensor, dim: Any = (), keepdim: bool = False, mode: int = 0) -> Spec:
    """Combine the bits of all elements, as float64 or int64, by exclusive or."""

    def body(local: torch.Tensor, over: ReducedDims) -> torch.Tensor:
        if 0 in local.shape:
            hashes = local.new_zeros(drop_dims(local.shape, over.dims, over.keepdim, 1)).long()
        else:
            hashes = torch.hash_tensor(local, over.dims, keepdim=over.keepdim, mode=mode)
        return torch.hash_tensor(over.stacked(hashes.view(torch.int64)), 0, mode=mode)

    return reduction_spec(input, dim, keepdim, "whole", body)


@rule("segment_reduce")
def segment_reduce(
    data: torch.Tensor,
    reduce: str,
    *,
    lengths: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Any = None,
) -> Spec | None:
    """Reduce along one dim, which is whole; the dims before it are also dims of lengths or
    offsets."""
    borders = lengths if lengths is not None else offsets
    if borders is None or axis != borders.dim() - 1:
        return None  # raises torch's own error
    count = borders.shape[axis] - (0 if borders is lengths else 1)
    names = replace_dim(dims_of(data), axis, None)
    inputs = [(data, names), (borders, names[: axis + 1])]
    return Spec(inputs, [Out(names, replace_dim(data.shape, axis, count))])
