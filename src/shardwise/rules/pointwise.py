"""Pointwise operators: every dim of the result is a free factor; inputs broadcast."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.rules.registry import rule
from shardwise.rules.spec import Dims, Out, Spec


def broadcast(tensors: list[torch.Tensor], linear: Any = (), **extra: Any) -> Spec:
    """The spec of an operator on tensors that broadcast against each other."""
    shape = tuple(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))
    inputs: list[tuple[torch.Tensor, Dims]] = []
    for tensor in tensors:
        skipped = len(shape) - tensor.dim()
        dims = tuple(
            f"d{at + skipped}" if size == shape[at + skipped] else None
            for at, size in enumerate(tensor.shape)
        )
        inputs.append((tensor, dims))
    names = tuple(f"d{at}" for at in range(len(shape)))
    return Spec(inputs, [Out(names, shape)], linear=linear, **extra)


def tensors_among(*args: Any) -> list[torch.Tensor]:
    """The tensors among arguments, in order."""
    return [arg for arg in args if isinstance(arg, torch.Tensor)]


@rule("add", "sub", "subtract", "rsub", ignores_numbers=True)
def add(input: Any, other: Any, **kwargs: Any) -> Spec:
    tensors = tensors_among(input, other)
    return broadcast(tensors, [(0, 1)] if len(tensors) == 2 else ())


@rule("mul", "multiply", ignores_numbers=True)
def mul(input: Any, other: Any, **kwargs: Any) -> Spec:
    tensors = tensors_among(input, other)
    return broadcast(tensors, [(0,), (1,)] if len(tensors) == 2 else [(0,)])


@rule("relu", "exp", ignores_numbers=True)
def unary(input: torch.Tensor, *args: Any, **kwargs: Any) -> Spec:
    return broadcast([input])
