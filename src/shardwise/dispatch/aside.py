"""Calls made of other calls: results that are made aside, then copied to where they should be."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from shardwise.dispatch.entry import Entry, check_writable
from shardwise.errors import DispatchError
from shardwise.layout import Layout
from shardwise.tensor import DTensor
from shardwise.torch_internals import OpOverload


class AsIs(Entry):
    """A call whose result is not re-typed: it is made of other calls."""

    __slots__ = ()

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        super().__init__(
            name, run, [], [], (), plain=False, inplace=False, fresh=True, severed=False
        )

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.run(*args, **kwargs)


def computed_aside(name: str, outplace: Callable[..., Any], keeps: Layout | None) -> Entry:
    """An in-place call whose result cannot be made where it must lie: make it, then copy it."""
    assert keeps is not None, "the target is a DTensor"

    def run(*args: Any, **kwargs: Any) -> Any:
        target = args[0]
        check_writable(name, target)
        if torch.is_grad_enabled() and target.requires_grad:
            args = (target.clone(), *args[1:])  # its gradient may need what is overwritten
        result = outplace(*args, **kwargs)
        if result.shape != keeps.size:
            raise DispatchError(
                f"{name}: output with shape {list(keeps.shape)} doesn't match the broadcast shape "
                f"{list(result.shape)}; a DTensor is not resized in place"
            )
        if not torch.can_cast(result.dtype, target.dtype):
            raise RuntimeError(
                f"result type {result.dtype} can't be cast to the desired output type "
                f"{target.dtype}"
            )
        target.copy_(result)
        return target

    return AsIs(name, run)


# ---- tensors among the keywords that are not operands

_NUMBERS = ("alpha", "beta")
"""Keywords that are numbers to torch, which also takes tensors for them."""


def numbers_among(name: str, kwargs: dict[str, Any]) -> list[str]:
    """The keywords that are numbers to torch, where a tensor was given."""
    numbers = (*_NUMBERS, "value") if name.startswith("addc") else _NUMBERS
    return [each for each in numbers if isinstance(kwargs.get(each), torch.Tensor)]


def with_numbers(func: Any, name: str, keywords: list[str]) -> Entry:
    """A call whose keywords are such tensors."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **{**kwargs, **{each: kwargs[each].item() for each in keywords}})

    return AsIs(name, run)


def into_out(func: Any, name: str) -> Entry:
    """A call with `out=`: make the result, then copy it to where it should lie."""

    # torch.ops.aten.add.out has no meaning without `out`: the operator finds its overload.
    makes = func.overloadpacket if isinstance(func, OpOverload) else func

    def run(*args: Any, out: Any, **kwargs: Any) -> Any:
        copy_into(name, makes(*args, **kwargs), out)
        return out

    return AsIs(name, run)


def copy_into(name: str, made: Any, target: Any) -> None:
    """Copy results to where `out=` says."""
    if not isinstance(target, torch.Tensor):
        for one, where in zip(made, target, strict=True):
            copy_into(name, one, where)
        return
    if not isinstance(target, DTensor):
        raise DispatchError(
            f"{name}(out=): expected a DTensor, as the inputs are; got a plain tensor. "
            "Give out= a DTensor, or use to_local() or full_tensor() of the result"
        )
    if torch.is_grad_enabled() and (made.requires_grad or target.requires_grad):
        raise DispatchError(
            f"{name}(out=): expected tensors that require no grad, as out= has no gradient in "
            "torch either; use the result, or torch.no_grad()"
        )
    if target.shape != made.shape:
        raise DispatchError(
            f"{name}(out=): expected a DTensor of shape {tuple(made.shape)}, "
            f"got {tuple(target.shape)}; a DTensor is not resized in place"
        )
    if not torch.can_cast(made.dtype, target.dtype):
        raise RuntimeError(
            f"result type {made.dtype} can't be cast to the desired output type {target.dtype}"
        )
    target.copy_(made)


# ---- functions that torch wrote in Python


@lru_cache(maxsize=4096)
def decomposed(func: Any) -> Callable[..., Any] | None:
    """A torch function written in Python, without its first question whether an argument
    overrides it: then the functions it calls are what is dispatched."""
    func = getattr(func, "__wrapped__", func)
    if not isinstance(func, types.FunctionType) or not func.__module__.startswith("torch"):
        return None
    names = {name for name in func.__code__.co_names if name.startswith("has_torch_function")}
    if not names or "overrides" in func.__code__.co_names:  # asked through its module
        return None
    changed = {**func.__globals__, **dict.fromkeys(names, _never)}
    copy = types.FunctionType(
        func.__code__, changed, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _never(*args: Any) -> bool:
    return False
