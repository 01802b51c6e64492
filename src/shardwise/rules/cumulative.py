"""Running sums and products along a dim, and differences of neighbours.

Along a split dim, `cumsum` and `cumprod` are local, plus (times) the totals of the ranks before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.comm import communicator
from shardwise.rules.calls import input_of, with_synonyms
from shardwise.rules.collectives import stacked
from shardwise.rules.dims import Inputs, as_dims, replaced, whole_along, without
from shardwise.rules.precision import keeps_sums
from shardwise.rules.registry import rule
from shardwise.rules.spec import Here, Out, Spec, dims_of

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _running(
    input: torch.Tensor,
    dim: int,
    dtype: torch.dtype | None,
    run: Callable[..., torch.Tensor],
    reduce: Callable[..., torch.Tensor],
    combine: Combine,
) -> Spec:
    """The spec of a running sum or product.

    Arguments:
        run: the operator.
        reduce: its last value.
        combine: one of two parts that follow each other.
    """
    names = dims_of(input)
    split = names[as_dims(dim, input.dim())[0]] if input.dim() else None

    def lower(here: Here) -> Callable[..., Any] | None:
        axes = here.axes(split)
        if not axes:
            return None
        before = communicator(here.mesh, axes).index

        def lowered(*args: Any, **kwargs: Any) -> torch.Tensor:
            local = input_of(args, kwargs)
            # Every rank uses the totals beside its own piece: gradients are contributions.
            totals = stacked(reduce(local, dim, True, dtype=dtype), here.mesh, axes, is_used=True)
            return combine(run(local, dim, dtype=dtype), reduce(totals[:before], 0))

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


# ---- the dim is whole


def _whole(input: torch.Tensor, dim: int, outputs: int) -> Spec:
    dims = as_dims(dim, input.dim())
    out = Out(without(dims_of(input), dims, True), tuple(input.shape))
    return whole_along(input, dims, [out] * outputs)


@rule("logcumsumexp")
@with_synonyms
def logcumsumexp(input: torch.Tensor, dim: int) -> Spec:
    return _whole(input, dim, 1)


@rule("cummax", "cummin")
@with_synonyms
def cummax(input: torch.Tensor, dim: int) -> Spec:
    return _whole(input, dim, 2)


@rule("diff")
@with_synonyms
def diff(
    input: torch.Tensor,
    n: int = 1,
    dim: int = -1,
    prepend: torch.Tensor | None = None,
    append: torch.Tensor | None = None,
) -> Spec:
    (along,) = as_dims(dim, input.dim()) or (0,)
    given = [each for each in (input, prepend, append) if each is not None]
    dims = replaced(dims_of(input), along, None)
    size = max(0, sum(each.shape[along] for each in given) - n)
    shape = replaced(input.shape, along, size)
    return Spec(
        [(each, dims) for each in given], [Out(dims, shape)], linear=[tuple(range(len(given)))]
    )


def _trapezoid(shrinks: Callable[[int], tuple[int, ...]]) -> Callable[..., Spec | None]:
    """The rule of an integral along a dim, that leaves so much of a size."""

    def made(y: torch.Tensor, x: Any = None, *, dx: Any = None, dim: int = -1) -> Spec | None:
        (along,) = as_dims(dim, y.dim()) or (0,)
        dims = replaced(dims_of(y), along, None)
        inputs: Inputs = [(y, dims)]
        if isinstance(x, torch.Tensor):
            over = (1,) * (y.dim() - x.dim()) + tuple(x.shape)
            fits = zip(over, y.shape, strict=False)
            if x.dim() > y.dim() or (x.dim() != 1 and any(a not in (1, b) for a, b in fits)):
                return None  # the result is larger than y
            shared = [dims[at] if size != 1 else None for at, size in enumerate(over)]
            inputs.append((x, (None,) if x.dim() == 1 else tuple(shared[y.dim() - x.dim() :])))
        sizes = shrinks(y.shape[along])
        kept = bool(sizes)
        shape = (*y.shape[:along], *sizes, *y.shape[along + 1 :])
        out = Out(dims if kept else without(dims, (along,)), shape)
        return Spec(inputs, [out], linear=[(0,)])

    return made


rule("trapz", "trapezoid")(_trapezoid(lambda size: ()))
rule("cumulative_trapezoid")(_trapezoid(lambda size: (max(0, size - 1),)))
