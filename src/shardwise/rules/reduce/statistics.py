"""Variances, norms, logsumexp, distances and covariances.

Over split dims a variance is merged from the variances of the ranks (never from a mean of squares,
which would lose precision), and a norm from the norms of the ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from shardwise.rules.helpers.collectives import sum_grads_over
from shardwise.rules.helpers.dims import as_dims, drop_dims, whole_dims_spec
from shardwise.rules.helpers.local_tensors import keeps_sums, vector_of, wide_dtype, widen
from shardwise.rules.reduce.extremes import extreme_value
from shardwise.rules.reduce.reduction import ReducedDims, reduced_dims, reduction_spec
from shardwise.rules.registry import Aten, composed, input_of, rule, with_synonyms
from shardwise.rules.spec import Out, Spec, SplitContext, dims_of
from shardwise.torch_internals import VF

# ---- variances


def _moments(
    local: torch.Tensor, over: ReducedDims, correction: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return variance and mean over split dims, by one all-gather of each rank's variance and
    mean."""
    if not keeps_sums(local.dtype):
        return torch.var_mean(local, over.dims)  # raises torch's own error
    wide = widen(local)
    mine = math.prod(local.shape[dim] for dim in over.dims)
    if local.numel():
        spread, mean = torch.var_mean(wide, over.dims, correction=0, keepdim=over.keepdim)
        spread = spread * mine
    else:
        mean = wide.sum(over.dims, keepdim=over.keepdim)
        spread = mean.abs()
    every = over.stacked(torch.stack([mean, spread.to(mean.dtype)]))
    means, spreads = every[:, 0], every[:, 1]
    counts = vector_of(over.counts, spread)
    counts = counts.view(-1, *[1] * mean.dim())
    mean = (means * counts).sum(0) / over.count
    away = means - mean
    apart = (spreads + counts * away * away.conj()).sum(0)
    apart = apart.real if apart.is_complex() else apart
    freedom = over.count - correction
    if freedom > 0:
        return apart / freedom, mean
    return _InfiniteVariance.apply(wide, apart.detach() / 0.0, over, freedom), mean  # type: ignore[no-untyped-call]


class _InfiniteVariance(torch.autograd.Function):
    """A variance without degrees of freedom: infinite, or NaN for equal elements.

    Forward: nothing, the variance is known. Backward: the all-reduce of the mean. torch's gradient
    is the centered elements times infinity; the gradients of the merged variance would be
    differences of infinities.
    """

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, variance: torch.Tensor, over: ReducedDims, freedom: float
    ) -> torch.Tensor:
        ctx.save_for_backward(local)
        ctx.over, ctx.factor = over, 2 / freedom if freedom else math.inf
        return variance.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (local,), over = ctx.saved_tensors, ctx.over
        mean = over.total(local.sum(over.dims, keepdim=True)) / over.count
        centered = local - sum_grads_over(mean, over.mesh, over.axes)
        gradient = gradients[0] if over.keepdim else _with_dims(gradients[0], over.dims)
        gradient = sum_grads_over(gradient, over.mesh, over.axes)
        return gradient * ctx.factor * centered, None, None, None


def _with_dims(tensor: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Return a reduced tensor with its dims of size 1 again."""
    for dim in dims:
        tensor = tensor.unsqueeze(dim)
    return tensor


def _square_root(squares: torch.Tensor) -> torch.Tensor:
    """Return the square root; its gradient at 0 is 0, as for torch's deviations and norms."""
    is_zero = squares == 0
    return squares.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)


def _variance(name: str) -> Callable[..., Any]:
    """Return the rule of var, std, var_mean or std_mean."""

    @with_synonyms
    def made(
        input: torch.Tensor,
        dim: Any = None,
        unbiased: Any = None,
        keepdim: bool = False,
        *,
        correction: float | None = None,
    ) -> Spec:
        if isinstance(dim, bool):  # x.var(False)
            dim, unbiased = None, dim
        if correction is None:
            correction = 0 if unbiased is False else 1

        def body(local: torch.Tensor, over: ReducedDims) -> Any:
            variance, mean = _moments(local, over, correction)
            if name.startswith("std"):
                variance = _square_root(variance)
            variance = variance.to(local.dtype.to_real())
            return (variance, mean.to(local.dtype)) if name.endswith("_mean") else variance

        outputs = 2 if name.endswith("_mean") else 1
        return reduction_spec(input, dim, keepdim, "whole", body, outputs=outputs, warns=True)

    return made


for _name in ("var", "std", "var_mean", "std_mean"):
    rule(_name)(_variance(_name))


# ---- norms


def _norm(
    local: torch.Tensor, over: ReducedDims, order: float, dtype: torch.dtype | None
) -> torch.Tensor:
    """Return the norm of vectors over split dims."""
    kind = dtype or local.dtype
    if not keeps_sums(kind):
        raise NotImplementedError(  # as torch 2.15; a RuntimeError, as before
            f"linalg.vector_norm: Expected a floating point or complex tensor as input. Got {kind}"
        )
    local = local.to(wide_dtype(kind))
    if math.isinf(order):
        found = extreme_value(local.abs(), over, "max" if order > 0 else "min")
        return found.to(kind.to_real())
    if order < 0 and 0 in local.shape:
        # Only an empty vector has no norm; an empty shard contributes a value that never wins.
        shape = drop_dims(local.shape, over.dims, over.keepdim, 1)
        mine = local.abs().sum(over.dims, over.keepdim) + torch.full(
            shape, math.inf, dtype=local.dtype.to_real(), device=local.device
        )
    else:
        mine = torch.linalg.vector_norm(local, order, over.dims, over.keepdim)
    if order in (0, 1):
        found = over.total(mine)
    elif order == 2:
        found = _square_root(over.total(mine * mine))
    else:
        every = over.stacked(mine)
        if 0 in over.counts:  # drop empty shards: the second gradient at 0 is NaN
            every = every[[rank for rank, count in enumerate(over.counts) if count]]
        found = torch.linalg.vector_norm(every, order, 0)
    return found.to(kind.to_real())


def _vector(input: torch.Tensor, order: float, dim: Any, keepdim: bool, dtype: Any) -> Spec:
    return reduction_spec(
        input, dim, keepdim, "whole", lambda local, over: _norm(local, over, order, dtype)
    )


def _matrix(input: torch.Tensor, order: Any, dim: Any, keepdim: bool, dtype: Any) -> Spec | None:
    rows, columns = (each % input.dim() for each in dim)
    if order == "fro":
        return _vector(input, 2, dim, keepdim, dtype)
    dims, names = (rows, columns), dims_of(input)
    out = Out(drop_dims(names, dims, keepdim, None), drop_dims(input.shape, dims, keepdim, 1))
    if order not in (1, -1, math.inf, -math.inf) or 0 in (input.shape[rows], input.shape[columns]):
        # needs singular values, or raises torch's own error
        return dataclasses.replace(whole_dims_spec(input, dims, [out]), may_fail=True)
    summed, other = (rows, columns) if abs(order) == 1 else (columns, rows)

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        if not context.axes(names[rows], names[columns]):
            return None
        along = reduced_dims(context, names, (summed,), True)
        across = reduced_dims(context, names, (other,), True)

        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            local = input_of(args, kwargs)
            kind = dtype or local.dtype
            wide = local.to(wide_dtype(kind))
            sums = along.total(wide.abs().sum(summed, keepdim=True))
            found = extreme_value(sums, across, "max" if order > 0 else "min")
            return (found if keepdim else found.squeeze(dims)).to(kind.to_real())

        return run

    split = {names[each]: "whole" for each in dims}
    return Spec([(input, names)], [out], split, lower=lower, positions=())


@rule("linalg.vector_norm")
@with_synonyms
def vector_norm(
    input: torch.Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Spec:
    return _vector(input, ord, dim, keepdim, dtype)


@rule("linalg.matrix_norm")
@with_synonyms
def matrix_norm(
    input: torch.Tensor,
    ord: Any = "fro",
    dim: Any = (-2, -1),
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Spec | None:
    return _matrix(input, ord, dim, keepdim, dtype)


@rule("linalg.norm")
@with_synonyms
def linalg_norm(
    input: torch.Tensor,
    ord: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Spec | None:
    if ord is None:
        return _vector(input, 2, dim, keepdim, dtype)
    dims = tuple(range(input.dim())) if dim is None else (dim,) if isinstance(dim, int) else dim
    if len(dims) == 2:
        return _matrix(input, ord, dims, keepdim, dtype)
    return None if isinstance(ord, str) else _vector(input, ord, dims, keepdim, dtype)


@rule(torch.norm, torch.Tensor.norm, VF.norm, Aten("norm"))
@with_synonyms
def norm(
    input: torch.Tensor,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    *others: Any,
    dtype: Any = None,
) -> Spec | None:
    for each in (
        dim,
        *others,
    ):  # aten takes the dtype before the dims, and the method takes it after them
        dtype = each if isinstance(each, torch.dtype) else dtype
    if isinstance(dim, torch.dtype):
        dim = None
    if p == "nuc":
        return None
    return _vector(input, 2 if p is None or p == "fro" else p, dim, keepdim, dtype)


@rule(VF.frobenius_norm, torch.frobenius_norm)
@with_synonyms
def frobenius_norm(input: torch.Tensor, dim: Any = None, keepdim: bool = False) -> Spec:
    return _vector(input, 2, dim, keepdim, None)


@rule(VF.nuclear_norm, torch.nuclear_norm)
@with_synonyms
def nuclear_norm(input: torch.Tensor, dim: Any = (-2, -1), keepdim: bool = False) -> Spec | None:
    return _matrix(input, "nuc", dim, keepdim, None)


# ---- logsumexp


@rule("logsumexp", "special.logsumexp")
@with_synonyms
def logsumexp(input: torch.Tensor, dim: Any, keepdim: bool = False) -> Spec:
    def body(local: torch.Tensor, over: ReducedDims) -> torch.Tensor:
        if not (local.is_floating_point() or local.is_complex()):
            local = local.to(torch.get_default_dtype())
        wide = widen(local)
        kept = ReducedDims(over.layout, over.axes, over.dims, True)
        if over.count == 0:
            return torch.full_like(local.sum(over.dims, over.keepdim), -math.inf)
        real = wide.detach().real if wide.is_complex() else wide.detach()
        largest = extreme_value(real, kept, "max")
        largest = largest.masked_fill(largest.isinf(), 0.0)
        sums = over.total((wide - largest).exp().sum(over.dims, keepdim=True))
        return over.kept(sums.log() + largest).to(local.dtype)

    return reduction_spec(input, dim, keepdim, "whole", body)


# ---- functions composed of these


@composed("cosine_similarity")
def cosine_similarity(
    x1: torch.Tensor, x2: torch.Tensor, dim: int = 1, eps: float = 1e-8
) -> torch.Tensor:
    kind = torch.result_type(x1, x2)
    shape = torch.Size(torch.broadcast_shapes(x1.shape, x2.shape))  # type: ignore[no-untyped-call]
    units = []
    for each in (x1, x2):
        each = each if each.is_floating_point() else each.to(kind)
        each = each if each.shape == shape else each.expand(shape)
        length = torch.linalg.vector_norm(each, 2, dim, keepdim=True)
        missing = (eps - length.detach()).clamp_min(0)  # eps takes no part in torch's gradient
        units.append(each / (length + missing))
    found: torch.Tensor = (units[0] * units[1]).sum(dim)
    return found


@composed("pairwise_distance")
def pairwise_distance(
    x1: torch.Tensor, x2: torch.Tensor, p: float = 2, eps: float = 1e-6, keepdim: bool = False
) -> torch.Tensor:
    found: torch.Tensor = torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim=keepdim)
    return found


@composed("dist")
def dist(input: torch.Tensor, other: torch.Tensor, p: float = 2) -> torch.Tensor:
    found: torch.Tensor = torch.linalg.vector_norm(input - other, p)
    return found


@composed("renorm")
def renorm(input: torch.Tensor, p: float, dim: int, maxnorm: float) -> torch.Tensor:
    if input.dim() < 2:
        raise RuntimeError("renorm: input needs at least 2 dimensions")
    (kept,) = as_dims(dim, input.dim())
    others = tuple(each for each in range(input.dim()) if each != kept)
    length = torch.linalg.vector_norm(input, p, others, keepdim=True)
    scale: torch.Tensor = torch.where(length > maxnorm, maxnorm / (length + 1e-7), 1.0)
    return (input * scale).to(input.dtype)


# ---- covariances


@composed("cov")
def cov(
    input: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the covariance of variables (rows); split observations (columns) leave a pending
    sum."""
    _check_weights(input, fweights, aweights)
    rows = input if input.dim() == 2 else input.reshape(1, input.numel())
    given = [each for each in (fweights, aweights) if each is not None]
    weights = functools.reduce(torch.mul, given) if given else None
    count: Any = rows.shape[1] if weights is None else weights.sum()
    if weights is not None and bool(count == 0):
        raise RuntimeError("cov(): weights sum to zero, can't be normalized")
    freedom = count - correction
    if weights is not None and aweights is not None:
        freedom = count - correction * (weights * aweights).sum() / count
    if bool(freedom <= 0):
        warnings.warn(
            "cov(): degrees of freedom is <= 0. Correction should be strictly less than the "
            "number of observations.",
            stacklevel=2,
        )
        freedom = freedom * 0
    mean = (rows if weights is None else rows * weights).sum(1, keepdim=True) / count
    centered = rows - mean
    weighed = centered if weights is None else centered * weights
    found: torch.Tensor = torch.mm(centered, weighed.mH) / freedom
    return found.squeeze()


def _check_weights(input: torch.Tensor, *weights: torch.Tensor | None) -> None:
    """Raise torch's own error for weights that it refuses."""
    shapes = [
        None if each is None else torch.empty(each.shape, dtype=each.dtype, device="meta")
        for each in (input, *weights)
    ]
    with contextlib.suppress(NotImplementedError):
        torch.cov(shapes[0], fweights=shapes[1], aweights=shapes[2])  # type: ignore[arg-type]
    for name, each in zip(("fweights", "aweights"), weights, strict=True):
        if each is not None and bool((each < 0).any()):
            raise RuntimeError(f"cov(): {name} cannot be negative")


@composed("corrcoef")
def corrcoef(input: torch.Tensor) -> torch.Tensor:
    found = torch.cov(input)
    if found.dim() == 0:
        return found / found
    deviations = found.diagonal().real.sqrt()
    found = found / deviations.unsqueeze(1) / deviations
    if found.is_complex():
        return torch.complex(found.real.clamp(-1, 1), found.imag.clamp(-1, 1))
    return found.clamp(-1, 1)
