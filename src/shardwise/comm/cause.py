"""Why a collective happens: for which operator, in which module, on the way forward or backward.

Known only while somebody listens (`trace.listen`): whoever runs operators, modules and backward
nodes says so with `acting`, and a collective looks at `current()`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a collective happened."""

    operator: str = ""
    """The torch function that needed it, or `redistribute`; `unshard` or `reduce_gradients` if it
    was data parallelism; empty if it was called as such."""
    module: str = ""
    """The path of the module it ran in, from the outermost that was called; empty for that one. Of
    data parallelism: the sharded modules that it is for, with commas between them."""
    direction: str = "forward"
    """`forward` or `backward`."""
    target: Any = field(default=None, compare=False, repr=False)
    """The layout that a tensor is moved to by it; None if it is no such move."""

    @property
    def backward(self) -> Cause:
        """The cause of what the gradient then needs."""
        return replace(self, direction="backward")


class _Now(threading.local):
    """What a thread is doing. Simulated ranks are threads."""

    cause = Cause()
    function: Any = None
    names: dict[int, str] | None = None
    """The paths of the modules within the outermost one that is running, by their ids."""


_now = _Now()


def current() -> Cause:
    """Why a collective would happen here and now."""
    return _now.cause


def is_running(function: Any) -> bool:
    """Whether this torch function is the innermost that `running` was told of."""
    return _now.function is function


class acting:  # noqa: N801 (read as a verb: `with acting(cause):`)
    """Within, collectives have this cause."""

    __slots__ = ("_before", "_cause", "_function")

    def __init__(self, cause: Cause, function: Any = None) -> None:
        self._cause = cause
        self._function = function

    def __enter__(self) -> None:
        self._before = _now.cause, _now.function
        _now.cause, _now.function = self._cause, self._function

    def __exit__(self, *exception: object) -> None:
        _now.cause, _now.function = self._before


def running(operator: str, function: Any = None) -> acting:
    """Within, collectives are for this operator."""
    return acting(replace(_now.cause, operator=operator), function)


@contextmanager
def in_module(module: nn.Module) -> Iterator[None]:
    """Within, collectives are for this module, named by its path from the outermost that runs."""
    is_outermost = _now.names is None
    if is_outermost:
        _now.names = {id(each): name for name, each in module.named_modules()}
    assert _now.names is not None, "just set"
    here = _now.names.get(id(module), f"{_now.cause.module}.{type(module).__name__}")
    try:
        with acting(replace(_now.cause, operator="", module=here)):
            yield
    finally:
        if is_outermost:
            _now.names = None
