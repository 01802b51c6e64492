"""Softmax and log_softmax, and their backward operators.

All dims but the normalized one are free. Along a split dim only the reduced values are
communicated: a maximum and a sum in the forward, a sum in the backward operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.core.mesh import DeviceMesh
from shardwise.rules.helpers.collectives import all_reduce_both_ways, all_reduce_extreme
from shardwise.rules.helpers.local_tensors import widen
from shardwise.rules.registry import rule
from shardwise.rules.spec import Out, Spec, SplitContext, dims_of, normalize_dim, takes_shards

Lowering = Callable[..., torch.Tensor]
Total = Callable[[torch.Tensor], torch.Tensor]
"""Sums along a split dim over all ranks; the dim keeps size 1."""
Split = Callable[[torch.Tensor, Total], torch.Tensor]
"""Computes the result from the input minus its global maximum."""
Backward = Callable[[torch.Tensor, torch.Tensor, Total], torch.Tensor]
"""Computes the gradient of the input from the gradient of the result and the result."""


def subtract_max(
    input: torch.Tensor, dim: int, mesh: DeviceMesh, axes: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input minus its global maximum along a dim that `axes` split, and the maximum.

    Autograd treats the maximum as a constant: softmax and cross-entropy do not depend on it.
    """
    largest = _largest(input.detach(), dim)
    largest = all_reduce_extreme(largest, mesh, axes, "max")
    # If all elements are -inf, the difference is -inf and not NaN, and its exp is 0.
    return input - largest.clamp_min(torch.finfo(largest.dtype).min), largest


def _largest(local: torch.Tensor, dim: int) -> torch.Tensor:
    if local.shape[dim]:
        return local.amax(dim, keepdim=True)
    return local.new_full([1 if at == dim else n for at, n in enumerate(local.shape)], -torch.inf)


def _spec(
    input: torch.Tensor, dim: Any, split: Split, whole: Lowering | None = None
) -> Spec | None:
    """Return the spec of an operator along one dim.

    Arguments:
        split: computes the result if that dim is split.
        whole: runs if the dim is not split; by default the operator.
    """
    if not isinstance(dim, int):
        return None
    at = normalize_dim(dim, input.dim())
    names = dims_of(input)

    def lower(context: SplitContext) -> Lowering | None:
        axes = context.axes(names[at]) if names else ()
        if not axes:
            return whole

        total_of = _total(at, context.mesh, axes)

        def run(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            dtype = _dtype(args, kwargs) or input.dtype
            above, _ = subtract_max(widen(input.to(dtype)), at, context.mesh, axes)
            return split(above, total_of).to(dtype)

        return run

    return Spec([(input, names)], [Out(names, tuple(input.shape))], lower=lower, positions=())


def _total(dim: int, mesh: DeviceMesh, axes: Sequence[int]) -> Total:
    return lambda local: all_reduce_both_ways(local.sum(dim, keepdim=True), mesh, axes)


def _dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype among arguments; torch and torch.nn.functional differ in its position."""
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)), None)


def _builtin(function: Lowering) -> Lowering:
    """Return a function that calls torch's operator in place of the Python function of F."""

    @takes_shards
    def run(
        input: torch.Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return function(input, dim, dtype=dtype)

    return run


# ---- the rules


@rule("softmax", "special.softmax", "_softmax")
def softmax(input: torch.Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Spec | None:
    return _spec(input, dim, _split_softmax)


@rule(F.softmax)
def softmax_of_f(input: torch.Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Spec | None:
    return _spec(input, dim, _split_softmax, _builtin(torch.softmax))


@rule("log_softmax", "special.log_softmax", "_log_softmax")
def log_softmax(input: torch.Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Spec | None:
    return _spec(input, dim, _split_log_softmax)


@rule(F.log_softmax)
def log_softmax_of_f(
    input: torch.Tensor, dim: Any = None, *args: Any, **kwargs: Any
) -> Spec | None:
    return _spec(input, dim, _split_log_softmax, _builtin(torch.log_softmax))


@rule("_safe_softmax", inplace=False)
def safe_softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Spec | None:
    return _spec(input, dim, _split_safe_softmax)


def _split_softmax(above: torch.Tensor, total_of: Total) -> torch.Tensor:
    exps = above.exp()
    return exps / total_of(exps)


def _split_log_softmax(above: torch.Tensor, total_of: Total) -> torch.Tensor:
    return above - total_of(above.exp()).log()


def _split_safe_softmax(above: torch.Tensor, total_of: Total) -> torch.Tensor:
    """Return softmax, and 0 where all elements along the dim are -inf."""
    exps = above.exp()
    total = total_of(exps)
    return exps / torch.where(total == 0, 1, total)


# ---- backward operators


@rule("_softmax_backward_data", inplace=False)
def softmax_backward(
    grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> Spec:
    return _backward(grad_output, output, dim, _split_softmax_backward)


@rule("_log_softmax_backward_data", inplace=False)
def log_softmax_backward(
    grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> Spec:
    return _backward(grad_output, output, dim, _split_log_softmax_backward)


def _backward(grad: torch.Tensor, output: torch.Tensor, dim: int, split: Backward) -> Spec:
    at = normalize_dim(dim, output.dim())
    names = dims_of(output)

    def lower(context: SplitContext) -> Lowering | None:
        axes = context.axes(names[at]) if names else ()
        if not axes:
            return None
        total_of = _total(at, context.mesh, axes)

        def run(
            grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
        ) -> torch.Tensor:
            return split(widen(grad_output), widen(output), total_of).to(input_dtype)

        return run

    inputs = [(grad, names), (output, names)]
    outputs = [Out(names, tuple(output.shape))]
    return Spec(inputs, outputs, linear=[(0,)], lower=lower, positions=())


def _split_softmax_backward(
    grad: torch.Tensor, output: torch.Tensor, total_of: Total
) -> torch.Tensor:
    weighted = grad * output
    return weighted - output * total_of(weighted)


def _split_log_softmax_backward(
    grad: torch.Tensor, output: torch.Tensor, total_of: Total
) -> torch.Tensor:
    return grad - output.exp() * total_of(grad)
