"""Softmax and its logarithm: every other dim is free; along a split dim only what is reduced over
it travels, a maximum and a sum."""

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


def shifted(
    input: torch.Tensor, dim: int, mesh: DeviceMesh, axes: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The input less its global maximum along a dim that `axes` split, and that maximum.

    The maximum is a constant to autograd: softmax and cross-entropy do not change with it.
    """
    largest = _largest(input.detach(), dim)
    largest = extreme(largest, mesh, axes, "max")
    return input - largest, largest


def _largest(local: torch.Tensor, dim: int) -> torch.Tensor:
    if local.shape[dim]:
        return local.amax(dim, keepdim=True)
    return local.new_full([1 if at == dim else n for at, n in enumerate(local.shape)], -torch.inf)


def _spec(
    input: torch.Tensor,
    dim: Any,
    split: Callable[[int, Here], Lowering],
    whole: Lowering | None = None,
) -> Spec | None:
    """The spec of an operator along one dim.

    Arguments:
        split: what runs where that dim is split.
        whole: what does where it is not; by default the operator.
    """
    if not isinstance(dim, int):
        return None
    at = normalized(dim, input.dim())
    names = dims_of(input)

    def lower(here: Here) -> Lowering | None:
        return split(at, here) if here.axes(f"d{at}") else whole

    return Spec([(input, names)], [Out(names, tuple(input.shape))], lower=lower)


def _dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype among arguments; F's functions and torch's have it in different positions."""
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)), None)


@rule("softmax")
def softmax(input: torch.Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Spec | None:
    return _spec(input, dim, _split_softmax)


@rule(F.softmax)
def softmax_of_f(input: torch.Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Spec | None:
    return _spec(input, dim, _split_softmax, _builtin_softmax)


@takes_shards
def _builtin_softmax(
    input: torch.Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return torch.softmax(input, dim, dtype=dtype)


def _split_softmax(dim: int, here: Here) -> Lowering:
    axes = here.axes(f"d{dim}")

    def run(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        dtype = _dtype(args, kwargs) or input.dtype
        above, _ = shifted(widened(input.to(dtype)), dim, here.mesh, axes)
        exps = above.exp()
        return (exps / total_used(exps.sum(dim, keepdim=True), here.mesh, axes)).to(dtype)

    return run


@rule("log_softmax")
def log_softmax(input: torch.Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Spec | None:
    return _spec(input, dim, _split_log_softmax)


@rule(F.log_softmax)
def log_softmax_of_f(
    input: torch.Tensor, dim: Any = None, *args: Any, **kwargs: Any
) -> Spec | None:
    return _spec(input, dim, _split_log_softmax, _builtin_log_softmax)


@takes_shards
def _builtin_log_softmax(
    input: torch.Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return torch.log_softmax(input, dim, dtype=dtype)


def _split_log_softmax(dim: int, here: Here) -> Lowering:
    axes = here.axes(f"d{dim}")

    def run(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        dtype = _dtype(args, kwargs) or input.dtype
        above, _ = shifted(widened(input.to(dtype)), dim, here.mesh, axes)
        exps = total_used(above.exp().sum(dim, keepdim=True), here.mesh, axes)
        return (above - exps.log()).to(dtype)

    return run
