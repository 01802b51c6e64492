"""Aliases of functions that have a rule: operators with a number on the left, and activations that
torch implements in Python with an argument `inplace`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import shardwise.rules.pointwise.elementwise  # noqa: F401 (handlers registered here replace its rules)
from shardwise.dtensor.tensor import DTensor
from shardwise.rules.helpers.composed_ops import dispatched
from shardwise.rules.registry import handler
from shardwise.torch_internals import nn_builtins

Tensor = torch.Tensor


SPELLINGS: set[Any] = set()
"""The handlers of this module, which accept any kind of tensor and pass it on."""


def _spelled(name: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(made: Callable[..., Any]) -> Callable[..., Any]:
        SPELLINGS.add(made)
        return handler(name)(made)

    return register


def _run(function: Any, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[0], DTensor):  # skips one round through __torch_function__
        return dispatched(function, *args, **kwargs)
    return function(*args, **kwargs)


def _same(name: Any, function: Any) -> None:
    """Register `name(...)` as `function(...)`."""
    _spelled(name)(lambda func, args, kwargs: _run(function, *args, **kwargs))


def _swapped(name: Any, function: Any) -> None:
    """Register `name(x, y)` as `function(y, x)`."""
    _spelled(name)(lambda func, args, kwargs: _run(function, args[1], args[0]))


_same(Tensor.__pow__, Tensor.pow)
_same(Tensor.__ipow__, Tensor.pow_)
_same(Tensor.__rsub__, torch.rsub)
_same(Tensor.__floordiv__, torch.floor_divide)
_same("_is_all_true", torch.all)
_same("_is_any_true", torch.any)
_same("__iand__", Tensor.bitwise_and_)
_same("__ior__", Tensor.bitwise_or_)
_same("__ixor__", Tensor.bitwise_xor_)
_same("__ilshift__", Tensor.bitwise_left_shift_)
_same("__irshift__", Tensor.bitwise_right_shift_)

_swapped(Tensor.__rpow__, torch.pow)
_swapped(Tensor.__rmod__, torch.remainder)
_swapped(Tensor.__rfloordiv__, torch.floor_divide)
_swapped(Tensor.__rlshift__, torch.bitwise_left_shift)
_swapped(Tensor.__rrshift__, torch.bitwise_right_shift)
_swapped(Tensor.__rmatmul__, torch.matmul)


@_spelled(Tensor.__rdiv__)
def rdiv(func: Any, args: Any, kwargs: Any) -> Any:
    """Multiply by the reciprocal, as torch does: it rounds once more than a division."""
    return _run(Tensor.mul, args[0].reciprocal(), args[1])


def _activation(python: Any, function: Any, inplace: Any) -> None:
    """Register a Python function that has an `inplace` argument."""
    position = python.__code__.co_varnames.index("inplace")

    def activation(func: Any, args: Any, kwargs: Any) -> Any:
        chosen = function
        if len(args) > position:
            chosen = inplace if args[position] else function
            args = args[:position]
        elif "inplace" in kwargs:
            kwargs = dict(kwargs)
            chosen = inplace if kwargs.pop("inplace") else function
        return _run(chosen, *args, **kwargs)

    _spelled(python)(activation)


_builtin: Any = nn_builtins
_activations: list[tuple[Callable[..., Any], Any, Any]] = [
    (F.relu, torch.relu, torch.relu_),
    (F.relu6, _builtin.relu6, _builtin.relu6_),
    (F.elu, _builtin.elu, _builtin.elu_),
    (F.celu, torch.celu, torch.celu_),
    (F.selu, torch.selu, torch.selu_),
    (F.silu, _builtin.silu, _builtin.silu_),
    (F.mish, _builtin.mish, _builtin.mish_),
    (F.hardtanh, _builtin.hardtanh, _builtin.hardtanh_),
    (F.hardswish, _builtin.hardswish, _builtin.hardswish_),
    (F.hardsigmoid, _builtin.hardsigmoid, _builtin.hardsigmoid_),
    (F.leaky_relu, _builtin.leaky_relu, _builtin.leaky_relu_),
    (F.threshold, torch.threshold, torch.threshold_),
]
for _each in _activations:
    _activation(*_each)


def _part(function: Any) -> property:
    """Return a property for the real or imaginary part: a view that can be assigned to.

    torch's own property does not call `__torch_function__` on assignment.
    """

    def write(tensor: DTensor, value: Any) -> None:
        part = function(tensor)
        part.copy_(value) if isinstance(value, Tensor) else part.fill_(value)

    return property(lambda tensor: dispatched(function, tensor), write)


DTensor.real = _part(torch.real)  # type: ignore[assignment]
DTensor.imag = _part(torch.imag)  # type: ignore[assignment]
