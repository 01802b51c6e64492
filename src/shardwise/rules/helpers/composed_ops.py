"""Functions that are composed of other functions on DTensors, and access to their arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from shardwise.dtensor.composite import copy_into
from shardwise.dtensor.tensor import DTensor
from shardwise.dtensor.tensor import tensors_in as tensors_in
from shardwise.rules.registry import handler, name_of

# ---- arguments


_INPUT = ("input", "self", "x", "A")


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the first operand of a call, given by position or by any of its names."""
    found: torch.Tensor = (
        args[0] if args else next(kwargs[each] for each in _INPUT if each in kwargs)
    )
    return found


def with_synonyms(made: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that the first operand may have any of torch's names for it."""
    own = inspect.signature(made).parameters
    synonyms = {name: "input" for name in _INPUT if name not in own}

    @functools.wraps(made)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("out", None)  # the caller copies the result there
        return made(*args, **{synonyms.get(name, name): each for name, each in kwargs.items()})

    return renamed


# ---- functions


def composed(*names: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a replacement of torch functions, composed of other functions on DTensors.

    The replacement takes the same arguments as the functions.
    """

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
    """Dispatch a function of torch or of shardwise on DTensors."""
    return DTensor.__torch_function__(function, (), args, kwargs)  # type: ignore[no-untyped-call]


class Function:
    """A function of shardwise that dispatch plans and runs like a function of torch."""

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self.__name__ = name
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on local tensors."""
        return self._run(*args, **kwargs)

    def dispatched(self, *args: Any, **kwargs: Any) -> Any:
        """Dispatch the function on DTensors."""
        return dispatched(self, *args, **kwargs)
