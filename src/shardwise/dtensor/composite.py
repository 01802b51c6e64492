"""Composite calls: calls that are made of other calls on DTensors.

Results that cannot be computed in place are computed out of place, then copied into the target.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from shardwise.core.errors import DispatchError
from shardwise.core.layout import Layout
from shardwise.dtensor.local_shards import waited
from shardwise.dtensor.tensor import DTensor
from shardwise.dtensor.writes import check_writable, is_split, refuse_plain_target
from shardwise.torch_internals import OpOverload, pytree

Run = Callable[..., Any]


# ---- results that are copied into a target


def compute_then_copy(name: str, outplace: Run, target_layout: Layout) -> Run:
    """Return an in-place call that computes out of place, then copies into its first argument.

    Arguments:
        outplace: the operator that returns a new tensor.
        target_layout: the layout of the first argument, which stays.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        target = args[0]
        check_writable(name, target)
        if torch.is_grad_enabled() and target.requires_grad:
            args = (target.clone(), *args[1:])  # its gradient may need what is overwritten
        result = outplace(*args, **kwargs)
        if result.shape != target_layout.size:
            raise DispatchError(
                f"{name}: output with shape {list(target_layout.shape)} doesn't match the "
                f"broadcast shape {list(result.shape)}; a DTensor is not resized in place"
            )
        _check_cast(result, target)
        target.copy_(result)
        return target

    return run


def write_lowered(lowered: Run) -> Run:
    """Return the local in-place call of a lowering that returns a new local tensor.

    It communicates no more than the lowering: on other ranks the lowering may be the operator.
    """

    def run(target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        is_overwritten = torch.is_grad_enabled() and target.requires_grad
        made = lowered(target.clone() if is_overwritten else target, *args, **kwargs)
        _check_cast(made, target)
        return target.copy_(made)

    return run


def compute_into_out(func: Any, name: str) -> Run:
    """Return a call with `out=` that computes a new result, then copies it into `out`."""
    # torch.ops.aten.add.out cannot run without `out`: the operator finds its overload.
    outplace = func.overloadpacket if isinstance(func, OpOverload) else func

    def run(*args: Any, out: Any, **kwargs: Any) -> Any:
        copy_into(name, outplace(*args, **kwargs), out)
        return out

    return run


def copy_into(name: str, made: Any, target: Any) -> None:
    """Copy the results of a call into the tensors given as `out=`."""
    if not isinstance(target, torch.Tensor):
        for one, where in zip(made, target, strict=True):
            copy_into(name, one, where)
        return
    if torch.is_grad_enabled() and (made.requires_grad or target.requires_grad):
        raise DispatchError(
            f"{name}(out=): expected tensors that require no grad, as out= has no gradient in "
            "torch either; use the result, or torch.no_grad()"
        )
    if not isinstance(target, DTensor):
        made = as_plain(f"{name}(out=)", made)
        if not target.numel():
            target.resize_(made.shape)  # as torch does
    if target.shape != made.shape:
        raise DispatchError(
            f"{name}(out=): expected a tensor of shape {tuple(made.shape)}, "
            f"got {tuple(target.shape)}; beside DTensors it is not resized in place"
        )
    _check_cast(made, target)
    target.copy_(made)


def write_to_plain(name: str, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an in-place call on a plain tensor, with DTensors among the other arguments: every rank
    writes the same values to its own tensor."""

    def plain(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(plain, value))
        return as_plain(name, value) if isinstance(value, DTensor) else value

    return func(*map(plain, args), **{each: plain(value) for each, value in kwargs.items()})


def as_plain(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return the value that a call writes to a plain tensor, whole on every rank; differentiable.

    A pending reduction is computed, which is told once. A value that is split is refused: a plain
    tensor holds the whole on every rank, and gathering it is the user's decision.
    """
    if not isinstance(value, DTensor):
        return value
    layout = value._layout
    if is_split(layout):
        refuse_plain_target(name, layout)
    if layout.partial and name not in _told:
        _told.add(name)
        warnings.warn(
            f"{name}: a plain tensor is written to with a DTensor that is pending a reduction, "
            f"{layout!r}: the reduction is computed for it, one collective per call. To say so "
            "yourself, and to be rid of this warning, write x.full_tensor()",
            stacklevel=2,
        )
    return value.full_tensor()


_told: set[str] = set()
"""The operators that have warned of a reduction."""


def _check_cast(made: torch.Tensor, target: torch.Tensor) -> None:
    if not torch.can_cast(made.dtype, target.dtype):
        raise RuntimeError(
            f"result type {made.dtype} can't be cast to the desired output type {target.dtype}"
        )


# ---- keywords that are numbers to torch

_NUMBERS = ("alpha", "beta")
"""Keywords that are numbers to torch, which also accepts 0-d tensors for them."""


def tensors_for_numbers(name: str, kwargs: dict[str, Any]) -> list[str]:
    """List the keywords that are numbers to torch and were given as tensors."""
    numbers = (*_NUMBERS, "value") if name.startswith("addc") else _NUMBERS
    return [each for each in numbers if isinstance(kwargs.get(each), torch.Tensor)]


def call_with_numbers(func: Any, keywords: list[str]) -> Run:
    """Return a call that replaces the tensors at these keywords by their values."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **{**kwargs, **{each: kwargs[each].item() for each in keywords}})

    return run


def call_when_waited(func: Any) -> Run:
    """Return a call that waits for results of functional collectives among its arguments."""

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, waited, (args, kwargs))
        return func(*args, **kwargs)

    return run


# ---- functions that torch wrote in Python


@lru_cache(maxsize=4096)
def decompose(func: Any) -> Run | None:
    """Return a copy of a Python function of torch that skips the check for overrides.

    The copy calls the functions that `func` is made of, and these are dispatched. None if torch
    did not write `func` in Python.
    """
    func = getattr(func, "__wrapped__", func)
    if not isinstance(func, types.FunctionType) or not func.__module__.startswith("torch"):
        return None
    names = {name for name in func.__code__.co_names if name.startswith("has_torch_function")}
    if not names or "overrides" in func.__code__.co_names:  # it asks through torch.overrides
        return None
    if func.__name__ in func.__code__.co_names and "__class__" in func.__code__.co_freevars:
        return None  # it calls super()'s method, which torch dispatches as this function again
    changed = {**func.__globals__, **dict.fromkeys(names, _never)}
    copy = types.FunctionType(
        func.__code__, changed, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _never(*args: Any) -> bool:
    return False
