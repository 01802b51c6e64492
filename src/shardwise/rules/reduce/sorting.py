"""Sorting and counting (sort, topk, bincount, unique), and comparison of two tensors.

Along a split dim `topk` gathers the few candidates of each rank and selects among them; a sort
needs the dim whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.comm import communicator
from shardwise.core.layout import Layout
from shardwise.dtensor.tensor import DTensor, unwrap, wrap
from shardwise.redistribute.autograd import redistribute_local
from shardwise.rules.helpers.collectives import all_gather_stack, all_reduce_extreme
from shardwise.rules.helpers.dims import as_dims, drop_dims, shapes_along, whole_dims_spec
from shardwise.rules.helpers.local_tensors import pad, take_rows
from shardwise.rules.reduce.reduction import reduces_as
from shardwise.rules.registry import composed, handler, input_of, rule, with_synonyms
from shardwise.rules.spec import Out, Spec, SplitContext, dims_of
from shardwise.torch_internals import as_local

# ---- sorting


def _sorted(input: torch.Tensor, dim: int, outputs: int) -> Spec:
    dims = as_dims(dim, input.dim())
    out = Out(drop_dims(dims_of(input), dims, True), tuple(input.shape))
    return whole_dims_spec(input, dims, [out] * outputs)


@rule("sort")
@with_synonyms
def sort(
    input: torch.Tensor, dim: int = -1, descending: bool = False, stable: bool | None = False
) -> Spec:
    return _sorted(input, dim, 2)


@rule("argsort")
@with_synonyms
def argsort(
    input: torch.Tensor, dim: int = -1, descending: bool = False, stable: bool = False
) -> Spec:
    return _sorted(input, dim, 1)


@rule("msort")
@with_synonyms
def msort(input: torch.Tensor) -> Spec:
    return _sorted(input, 0, 1)


@rule("topk")
@with_synonyms
def topk(
    input: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Spec:
    names = dims_of(input)
    dims = as_dims(dim, input.dim())
    if dims and not 0 <= k <= input.shape[dims[0]]:
        raise RuntimeError("selected index k out of range")
    shape = tuple(k if at in dims else size for at, size in enumerate(input.shape))
    out = Out(drop_dims(names, dims, True), shape)

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        axes = context.axes(*(names[each] for each in dims))
        if not axes:
            return None
        (along,) = dims
        layout = context.inputs[0]
        start, _ = layout.range(along)
        counts = [min(k, shape[along]) for shape in shapes_along(layout, axes)]
        real = [at * k + each for at, count in enumerate(counts) for each in range(count)]

        def joined(mine: torch.Tensor) -> torch.Tensor:
            """Gather the candidates of all ranks, in the order of the dim."""
            full = pad(mine, {along: (0, k - mine.shape[along])})
            every = (
                all_gather_stack(full, context.mesh, axes)
                .movedim(0, along)
                .flatten(along, along + 1)
            )
            return take_rows(every, along, real)

        def run(*args: Any, **kwargs: Any) -> Any:
            local = input_of(args, kwargs)
            values, indices = local.topk(min(k, local.shape[along]), along, largest)
            values, indices = joined(values), joined(indices + start)
            best, picked = values.topk(k, along, largest, sorted)
            return torch.return_types.topk((best, indices.gather(along, picked)))

        return run

    split = reduces_as(names, dims, "whole")
    return Spec([(input, names)], [out, out], split, lower=lower, positions=[*split])


# ---- counting


@composed("bincount")
def bincount(input: torch.Tensor, weights: Any = None, minlength: int = 0) -> DTensor:
    """Count each rank's own elements; the result is a pending sum whose length depends on the
    data."""
    layout = _common_layout(input, weights)
    axes = tuple(axis for order in layout.shard_order for axis in order)
    mine = _piece(input, layout)
    with as_local(), torch.no_grad():
        longest = mine.max() + 1 if mine.numel() else mine.new_zeros(())
        length = max(
            int(all_reduce_extreme(longest.to(torch.int64), layout.mesh, axes, "max")), minlength
        )
        weighed = None if weights is None else _piece(weights, layout)
        counts = torch.bincount(mine, weighed, length)
        if (
            weighed is not None and layout.numel and not mine.numel()
        ):  # torch returns integers for an empty shard
            counts = counts.to(torch.float32 if weighed.dtype == torch.float32 else torch.float64)
    return wrap(counts, Layout(layout.mesh, (length,), (), dict.fromkeys(axes, "sum")))


@handler("unique", "unique_consecutive", "unique_dim", "_unique2")
def unique(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather the input and run on every rank: values and sizes depend on all elements."""
    mesh = _common_layout(*args, *kwargs.values()).mesh

    def whole(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        return _piece(value, Layout(mesh, value._layout.shape))

    with as_local(), torch.no_grad():
        found = function(*map(whole, args), **{name: whole(each) for name, each in kwargs.items()})
        if isinstance(found, torch.Tensor):
            return wrap(found, Layout(mesh, found.shape))
        return tuple(wrap(each, Layout(mesh, each.shape)) for each in found)


# ---- comparison of two tensors


@composed("equal")
def equal(input: torch.Tensor, other: torch.Tensor) -> bool:
    if input.shape != other.shape:
        return False
    layout = _common_layout(input, other)
    pieces = [_piece(each, layout) for each in (input, other)]
    with as_local():
        mine = torch.tensor(torch.equal(*pieces), device=pieces[0].device)
        return bool(communicator(layout.mesh).all_reduce(mine, "min"))


@composed("allclose")
def allclose(*args: Any, **kwargs: Any) -> bool:
    with torch.no_grad():
        return bool(torch.isclose(*args, **kwargs).all())


def _common_layout(*values: Any) -> Layout:
    """Return the layout of the first DTensor, without pending reductions."""
    layout: Layout = next(each._layout for each in values if isinstance(each, DTensor))
    return layout.relaid(partial={})


def _piece(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return this rank's shard of a tensor in a layout, without gradient."""
    found: torch.Tensor
    if isinstance(tensor, DTensor):
        found = redistribute_local(unwrap(tensor).detach(), tensor._layout, layout)
    else:
        found = redistribute_local(tensor.detach(), Layout(layout.mesh, tensor.shape), layout)
    return found
