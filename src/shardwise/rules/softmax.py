"""Softmax and its logarithm: every other dim is free; along a split dim only what is reduced over
it travels, a maximum and a sum; for their backward, as operators of their own, a sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.mesh import DeviceMesh
from shardwise.rules.collectives import extreme, total_used
from shardwise.rules.precision import widened
from shardwise.rules.registry import rule
from shardwise.rules.spec import Here, Out, Spec, dims_of, normalized, takes_shards

Lowering = Callable[..., torch.Tensor]
Total = Callable[[torch.Tensor], torch.Tensor]
"""The sum along a split dim over all ranks, with size 1 there."""
Split = Callable[[torch.Tensor, Total], torch.Tensor]
"""The result, of the input less its global maximum."""
Backward = Callable[[torch.Tensor, torch.Tensor, Total], torch.Tensor]
"""The gradient of the input, of that of the result and the result."""


def shifted(
    input: torch.Tensor, dim: int, mesh: DeviceMesh, axes: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The input less its global maximum along a dim that `axes` split, and that maximum.

    The maximum is a constant to autograd: softmax and cross-entropy do not change with it.
    """
    largest = _largest(input.detach(), dim)
    largest = extreme(largest, mesh, axes, "max")
    # Where everything is -inf, what is left is too, and no nan: exp makes 0 of it.
    return input - largest.clamp_min(torch.finfo(largest.dtype).min), largest


def _largest(local: torch.Tensor, dim: int) -> torch.Tensor:
    if local.shape[dim]:
        return local.amax(dim, keepdim=True)
    return local.new_full([1 if at == dim else n for at, n in enumerate(local.shape)], -torch.inf)


def _spec(
    input: torch.Tensor, dim: Any, split: Split, whole: Lowering | None = None
) -> Spec | None:
    """The spec of an operator along one dim.

    Arguments:
        split: what it is where that dim is split.
        whole: what runs where it is not; by default the operator.
    """
    if not isinstance(dim, int):
        return None
    at = normalized(dim, input.dim())
    names = dims_of(input)

    def lower(here: Here) -> Lowering | None:
        axes = here.axes(names[at]) if names else ()
        if not axes:
            return whole

        total_of = _total(at, here.mesh, axes)

        def run(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            dtype = _dtype(args, kwargs) or input.dtype
            above, _ = shifted(widened(input.to(dtype)), at, here.mesh, axes)
            return split(above, total_of).to(dtype)

        return run

    return Spec([(input, names)], [Out(names, tuple(input.shape))], lower=lower, positions=())


def _total(dim: int, mesh: DeviceMesh, axes: Sequence[int]) -> Total:
    return lambda local: total_used(local.sum(dim, keepdim=True), mesh, axes)


def _dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype among arguments; F's functions and torch's have it in different positions."""
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)), None)


def _builtin(function: Lowering) -> Lowering:
    """What F's function comes to, which is written in Python: torch's own."""

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
    """0 where everything along the dim is -inf."""
    exps = above.exp()
    total = total_of(exps)
    return exps / torch.where(total == 0, 1, total)


# ---- their backward


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
    at = normalized(dim, output.dim())
    names = dims_of(output)

    def lower(here: Here) -> Lowering | None:
        axes = here.axes(names[at]) if names else ()
        if not axes:
            return None
        total_of = _total(at, here.mesh, axes)

        def run(
            grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
        ) -> torch.Tensor:
            return split(widened(grad_output), widened(output), total_of).to(input_dtype)

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
