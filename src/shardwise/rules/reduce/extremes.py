"""Maxima and minima (max, min, amax, amin, aminmax, argmax, argmin), medians and quantiles.

Values are combined by an all-reduce of the small local results; an index is that of the first
element with the value. Gradients are those of torch: `amax` and `max()` share the gradient among
equal elements, `max(dim)` gives it to the element that was selected.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from shardwise.rules.helpers.collectives import as_all_reduced
from shardwise.rules.helpers.dims import as_dims, drop_dims, whole_dims_spec
from shardwise.rules.helpers.local_tensors import lower_with_padding
from shardwise.rules.pointwise.elementwise import broadcast_spec
from shardwise.rules.reduce.reduction import ReducedDims, reduction_spec
from shardwise.rules.registry import rule, with_synonyms
from shardwise.rules.spec import Out, Spec, dims_of

_NOWHERE = torch.iinfo(torch.int64).max
"""The index that a rank without the value contributes."""


def _needs_gradient(local: torch.Tensor) -> bool:
    return local.requires_grad and torch.is_grad_enabled()


def _is_empty(local: torch.Tensor, dims: tuple[int, ...]) -> bool:
    return any(local.shape[dim] == 0 for dim in dims)


def _neutral(local: torch.Tensor, op: str, dims: tuple[int, ...]) -> torch.Tensor:
    """Return the contribution of an empty shard: a value that never wins."""
    dtype = local.dtype
    value: Any
    if dtype is torch.bool:
        value = op == "min"
    elif dtype.is_floating_point:
        value = -math.inf if op == "max" else math.inf
    else:
        value = torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max
    return local.new_full(drop_dims(local.shape, dims, True, 1), value)


def _same(local: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    same = local == value
    return same | (local.isnan() & value.isnan()) if local.is_floating_point() else same


# ---- values


def extreme_value(
    local: torch.Tensor, over: ReducedDims, op: str, *, nan_is_nan: bool = False
) -> torch.Tensor:
    """Return the maximum or minimum over split dims; equal elements share the gradient.

    Arguments:
        nan_is_nan: whether NaN equals NaN for the gradient; in torch it does for `max()`, not for
            `amax`.
    """
    if over.count == 0:
        return _local_extreme(op)(local, over.dims, over.keepdim)  # raises torch's own error
    with torch.no_grad():
        if _is_empty(local, over.dims):
            proposed = _neutral(local, op, over.dims)
        else:
            proposed = _local_extreme(op)(local, over.dims, True)
        value = over.extreme(proposed, op)
    if not _needs_gradient(local):
        return over.kept(value)
    same = _same(local, value) if nan_is_nan else local == value
    count = over.total(same.sum(over.dims, keepdim=True))
    mine = (local * same).sum(over.dims, keepdim=True) / count
    return over.kept(as_all_reduced(mine, value, over.mesh, over.axes))


def _local_extreme(op: str) -> Callable[..., torch.Tensor]:
    return torch.amax if op == "max" else torch.amin


@rule("amax")
@with_synonyms
def amax(input: torch.Tensor, dim: Any = (), keepdim: bool = False) -> Spec:
    return reduction_spec(
        input, dim, keepdim, "whole", lambda x, over: extreme_value(x, over, "max")
    )


@rule("amin")
@with_synonyms
def amin(input: torch.Tensor, dim: Any = (), keepdim: bool = False) -> Spec:
    return reduction_spec(
        input, dim, keepdim, "whole", lambda x, over: extreme_value(x, over, "min")
    )


@rule("aminmax")
@with_synonyms
def aminmax(input: torch.Tensor, *, dim: int | None = None, keepdim: bool = False) -> Spec:
    def body(local: torch.Tensor, over: ReducedDims) -> Any:
        found = extreme_value(local, over, "min"), extreme_value(local, over, "max")
        return torch.return_types.aminmax(found)

    return reduction_spec(input, dim, keepdim, "whole", body, outputs=2)


# ---- values with their indices


def _picked(local: torch.Tensor, over: ReducedDims, op: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maximum or minimum along one split dim and its first index, with the dim kept."""
    (dim,) = over.dims
    with torch.no_grad():
        if _is_empty(local, over.dims):
            proposed = _neutral(local, op, over.dims)
            at = torch.full_like(proposed, _NOWHERE, dtype=torch.int64)
            value = over.extreme(proposed, op)
        else:
            proposed, at = (torch.max if op == "max" else torch.min)(local, dim, keepdim=True)
            value = over.extreme(proposed, op)
            at = torch.where(_same(proposed, value), at + over.start[dim], _NOWHERE)
        index = over.extreme(at, "min")
    if not _needs_gradient(local):
        return value, index
    positions = torch.arange(local.shape[dim], device=local.device) + over.start[dim]
    positions = positions.view([-1 if each == dim else 1 for each in range(local.dim())])
    mine = (local * (positions == index)).sum(dim, keepdim=True)
    return as_all_reduced(mine, value, over.mesh, over.axes), index


def _extremes(name: str) -> Callable[..., Spec]:
    kind = getattr(torch.return_types, name)

    def made(input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Spec:
        if isinstance(other, torch.Tensor) or isinstance(dim, torch.Tensor):
            return broadcast_spec([input, dim if other is None else other])
        if dim is None:
            return reduction_spec(
                input, None, False, "whole",
                lambda x, over: extreme_value(x, over, name, nan_is_nan=True),
            )  # fmt: skip

        def body(local: torch.Tensor, over: ReducedDims) -> Any:
            return kind([over.kept(each) for each in _picked(local, over, name)])

        return _along_one(input, dim, keepdim, body, name, outputs=2)

    return made


def _along_one(
    input: torch.Tensor, dim: int, keepdim: bool, body: Any, name: str, outputs: int
) -> Spec:
    (only,) = as_dims(dim, input.dim()) or (0,)
    if input.dim() and input.shape[only] == 0:
        raise IndexError(f"{name}(): Expected reduction dim {dim} to have non-zero size.")
    return reduction_spec(input, dim, keepdim, "whole", body, outputs=outputs, by_index=True)


rule("max")(with_synonyms(_extremes("max")))
rule("min")(with_synonyms(_extremes("min")))


def _first_index(name: str) -> Callable[..., Spec]:
    op = name.removeprefix("arg")
    function = getattr(torch, name)

    def flat(local: torch.Tensor, over: ReducedDims) -> torch.Tensor:
        # The elements of a shard have the same order in the whole tensor, as a shard is a box.
        if local.numel() == 0:
            proposed = _neutral(local.reshape(-1), op, (0,))
            at = torch.full_like(proposed, _NOWHERE, dtype=torch.int64)
            value = over.extreme(proposed, op)
        else:
            proposed, at = (torch.max if op == "max" else torch.min)(
                local.reshape(-1), 0, keepdim=True
            )
            value = over.extreme(proposed, op)
            # By hand: torch.unravel_index makes a tensor of the shape, which a recorded program
            # would not know.
            left, at, stride = at, torch.zeros_like(at), 1
            for dim in reversed(range(local.dim())):
                at = at + (left % local.shape[dim] + over.start[dim]) * stride
                left = left // local.shape[dim]
                stride *= over.layout.shape[dim]
            at = torch.where(_same(proposed, value), at, _NOWHERE)
        index = over.extreme(at, "min")
        return index.view([1] * local.dim() if over.keepdim else [])

    def made(input: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Spec:
        def body(local: torch.Tensor, over: ReducedDims) -> torch.Tensor:
            with torch.no_grad():
                if over.count == 0:
                    return function(local, dim)  # type: ignore[no-any-return] # raises torch's own error
                return flat(local, over) if dim is None else over.kept(_picked(local, over, op)[1])

        return reduction_spec(input, dim, keepdim, "whole", body, by_index=True)

    return with_synonyms(made)


rule("argmax")(_first_index("argmax"))
rule("argmin")(_first_index("argmin"))


# ---- selection by order: the dim is whole


def _by_rank(input: torch.Tensor, dim: Any, keepdim: bool, outputs: int) -> Spec:
    dims = as_dims(dim, input.dim())
    out = Out(
        drop_dims(dims_of(input), dims, keepdim, None), drop_dims(input.shape, dims, keepdim, 1)
    )
    return whole_dims_spec(input, dims, [out] * outputs)


@rule("median", "nanmedian")
@with_synonyms
def median(input: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Spec:
    return _by_rank(input, dim, keepdim, 1 if dim is None else 2)


@rule("mode")
@with_synonyms
def mode(input: torch.Tensor, dim: int = -1, keepdim: bool = False) -> Spec:
    return _by_rank(input, dim, keepdim, 2)


@rule("kthvalue")
@with_synonyms
def kthvalue(input: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Spec:
    return _by_rank(input, dim, keepdim, 2)


def _quantile(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def made(
        input: torch.Tensor,
        q: Any,
        dim: int | None = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
    ) -> Spec:
        spec = _by_rank(input, dim, keepdim, 1)
        inputs, (out,) = list(spec.inputs), spec.outputs
        if isinstance(q, torch.Tensor):
            inputs.append((q, dims_of(q, "q")))
            out = Out((*dims_of(q, "q"), *out.dims), (*q.shape, *out.shape))
        return Spec(inputs, [out], lower=lower_with_padding(function) if input.numel() else None)

    return with_synonyms(made)


rule("quantile")(_quantile(torch.quantile))
rule("nanquantile")(_quantile(torch.nanquantile))
