"""Calls within calls: arguments by torch's names, and functions that DTensors are handed on to."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from shardwise.dispatch.aside import copy_into
from shardwise.rules.registry import handler, name_of
from shardwise.tensor import DTensor
from shardwise.tensor import tensors_in as tensors_in

# ---- arguments


_INPUT = ("input", "self", "x", "A")


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The input of a call, by position or by any of its names."""
    found: torch.Tensor = (
        args[0] if args else next(kwargs[each] for each in _INPUT if each in kwargs)
    )
    return found


def with_synonyms(made: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is called with torch's names for the input, where the caller used others."""
    own = inspect.signature(made).parameters
    synonyms = {name: "input" for name in _INPUT if name not in own}

    @functools.wraps(made)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("out", None)  # copied to afterwards, by those who call this
        return made(*args, **{synonyms.get(name, name): each for name, each in kwargs.items()})

    return renamed


# ---- functions


def composed(*names: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what stands for functions, made of others on DTensors; it is called as they are."""

    def register(made: Callable[..., Any]) -> Callable[..., Any]:
        run = with_synonyms(made)

        def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if kwargs.get("out") is None:
                return run(*args, **kwargs)
            copy_into(name_of(func), run(*args, **kwargs), kwargs["out"])
            return kwargs["out"]

        handler(*names)(handle)
        return made

    return register


def dispatched(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function, of torch's or of ours, on DTensors."""
    return DTensor.__torch_function__(function, (), args, kwargs)  # type: ignore[no-untyped-call]


class Function:
    """A function of ours that dispatch plans and runs as it does torch's own."""

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self.__name__ = name
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it on local tensors."""
        return self._run(*args, **kwargs)

    def dispatched(self, *args: Any, **kwargs: Any) -> Any:
        """Run it on DTensors."""
        return dispatched(self, *args, **kwargs)
