"""Running sums, products and extremes along a dim.

Along a split dim each rank computes its own and combines it with the totals of the ranks before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.comm import communicator
from shardwise.rules.helpers.collectives import all_gather_stack
from shardwise.rules.helpers.dims import as_dims, drop_dims, shapes_along, whole_dims_spec
from shardwise.rules.helpers.local_tensors import (
    crop,
    keeps_sums,
    lower_with_padding,
    pad_to_one_row,
    take_rows,
    widen,
)
from shardwise.rules.registry import input_of, rule, with_synonyms
from shardwise.rules.spec import Out, Spec, SplitContext, dims_of

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _running(
    input: torch.Tensor,
    dim: int,
    dtype: torch.dtype | None,
    run: Callable[..., torch.Tensor],
    reduce: Callable[..., torch.Tensor],
    combine: Combine,
) -> Spec:
    """Return the spec of a running sum or product.

    Arguments:
        run: the operator.
        reduce: computes the last value of the operator, the total of a part.
        combine: combines the totals of two adjacent parts.
    """
    names = dims_of(input)
    split = names[as_dims(dim, input.dim())[0]] if input.dim() else None
    kind = {} if dtype is None else {"dtype": dtype}

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        axes = context.axes(split)
        if not axes:
            return lower_with_padding(run)(context)
        before = communicator(context.mesh, axes).index

        def lowered(*args: Any, **kwargs: Any) -> torch.Tensor:
            local = input_of(args, kwargs)
            # Every rank uses the totals beside its own shard, so their gradients are contributions.
            totals = all_gather_stack(
                reduce(local, dim, True, **kind), context.mesh, axes, is_used=True
            )
            running = run(local, dim, **kind)
            return combine(running, reduce(totals[:before], 0)).to(running.dtype)

        return lowered

    linear = [(0,)] if run is torch.cumsum and keeps_sums(dtype) else ()
    out = Out(names, tuple(input.shape))
    positions = () if split is None else (split,)
    return Spec([(input, names)], [out], linear=linear, lower=lower, positions=positions)


@rule("cumsum", inplace=False)
@with_synonyms
def cumsum(input: torch.Tensor, dim: int, *, dtype: Any = None) -> Spec:
    return _running(input, dim, dtype, torch.cumsum, torch.sum, torch.add)


@rule("cumprod", inplace=False)
@with_synonyms
def cumprod(input: torch.Tensor, dim: int, *, dtype: Any = None) -> Spec:
    return _running(input, dim, dtype, torch.cumprod, torch.prod, torch.mul)


@rule("logcumsumexp", by_dtype=True)
@with_synonyms
def logcumsumexp(input: torch.Tensor, dim: int) -> Spec:
    if input.is_complex():  # complex logarithms are unique only up to multiples of 2 pi
        dims = as_dims(dim, input.dim())
        out = Out(drop_dims(dims_of(input), dims, True), tuple(input.shape))
        return whole_dims_spec(input, dims, [out])
    return _running(input, dim, None, torch.logcumsumexp, torch.logsumexp, _log_added)


def _log_added(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return torch.logaddexp with a second gradient that is right for -inf, the first rank's
    offset.
    """
    one, other = widen(one), widen(other)
    finite = torch.finfo(one.dtype)
    largest = torch.maximum(one, other).detach().clamp(finite.min, finite.max)
    return ((one - largest).exp() + (other - largest).exp()).log() + largest


# ---- running extremes with their indices


def _latest(name: str) -> Callable[..., Spec]:
    """Return the rule of a running extreme: the last of equal ones, and NaN from the first NaN
    on."""
    run = getattr(torch, name)
    is_beyond = torch.gt if name == "cummax" else torch.lt

    def made(input: torch.Tensor, dim: int) -> Spec:
        names = dims_of(input)
        along = as_dims(dim, input.dim())
        split = [f"d{each}" for each in along]

        def lower(context: SplitContext) -> Callable[..., Any] | None:
            axes = context.axes(*split)
            if not axes:
                return lower_with_padding(run)(context)
            (at,) = along
            shapes = shapes_along(context.inputs[0], axes)[: communicator(context.mesh, axes).index]
            before = [rank for rank, shape in enumerate(shapes) if shape[at]]
            start, _ = context.inputs[0].range(at)

            def lowered(*args: Any, **kwargs: Any) -> Any:
                local = input_of(args, kwargs)
                values, indices = run(pad_to_one_row(local, at), at)
                indices = indices + start
                last = [each.narrow(at, -1, 1) for each in (values, indices)]
                values, indices = (crop(each, local.shape) for each in (values, indices))
                theirs, places = (
                    all_gather_stack(each, context.mesh, axes, is_used=True) for each in last
                )
                theirs, places = (take_rows(each, 0, before or [0]) for each in (theirs, places))
                theirs, which = run(theirs, 0)
                theirs, places = theirs[-1], places.gather(0, which[-1:])[0]
                wins = is_beyond(theirs, values) | (theirs.isnan() & ~values.isnan())
                wins &= bool(before)
                return kind((theirs.where(wins, values), places.where(wins, indices)))

            return lowered

        out = Out(names, tuple(input.shape))
        return Spec([(input, names)], [out, out], lower=lower, positions=split)

    kind = getattr(torch.return_types, name)
    return with_synonyms(made)


rule("cummax")(_latest("cummax"))
rule("cummin")(_latest("cummin"))
