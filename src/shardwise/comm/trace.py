"""The trace: which collectives happen, and why.

Every collective passes `tell`, which hands an `Event` to each listener: who, what, over which axes,
how many bytes, when, and its `Cause`. The code that runs operators, modules and backward nodes sets
the cause with `trace_scope`, `operator_scope` and `module_scope`. Nothing is built while nobody
listens.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn

from shardwise.comm.pending import Pending

T = TypeVar("T")


# ---- causes


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a collective happened."""

    operator: str = ""
    """The torch function that needed it, or `redistribute`; `unshard` or `reduce_gradients` for
    data parallelism; empty if the program called the collective itself."""
    module: str = ""
    """The path of the module that ran, from the outermost module that was called; empty for the
    outermost. For data parallelism: the sharded modules it serves, separated by commas."""
    direction: str = "forward"
    """`forward` or `backward`."""
    target: Any = field(default=None, compare=False, repr=False)
    """The layout that the collective moves a tensor to; None if it is no such move."""

    @property
    def backward(self) -> Cause:
        """The cause of the collectives that the gradient needs."""
        return replace(self, direction="backward")


CallWatcher = Callable[[Any, Any, dict[str, Any], Callable[[], Any]], Any]
"""Gets a torch function on DTensors, its arguments, and how to run it; returns the result."""


class _Current(threading.local):
    """What a thread is doing now. Simulated ranks are threads."""

    cause = Cause()
    function: Any = None
    names: dict[int, str] | None = None
    """The paths of all modules within the outermost running module, by their ids."""
    call_watcher: CallWatcher | None = None


_current = _Current()


def current_cause() -> Cause:
    """Return the cause of a collective that would start now on this thread."""
    return _current.cause


def is_current_function(function: Any) -> bool:
    """Return whether this torch function is the innermost one that `operator_scope` was told of."""
    return _current.function is function


class trace_scope:  # noqa: N801 (used as a function: `with acting(cause):`)
    """A context in which collectives have this cause."""

    __slots__ = ("_before", "_cause", "_function")

    def __init__(self, cause: Cause, function: Any = None) -> None:
        self._cause = cause
        self._function = function

    def __enter__(self) -> None:
        self._before = _current.cause, _current.function
        _current.cause, _current.function = self._cause, self._function

    def __exit__(self, *exception: object) -> None:
        _current.cause, _current.function = self._before


def operator_scope(operator: str, function: Any = None) -> trace_scope:
    """Return a context in which collectives belong to this operator."""
    return trace_scope(replace(_current.cause, operator=operator), function)


@contextmanager
def module_scope(module: nn.Module) -> Iterator[None]:
    """Attribute collectives to a module, named by its path from the outermost running module."""
    is_outermost = _current.names is None
    if is_outermost:
        _current.names = {id(each): name for name, each in module.named_modules()}
    assert _current.names is not None, "just set"
    path = _current.names.get(id(module), f"{_current.cause.module}.{type(module).__name__}")
    try:
        with trace_scope(replace(_current.cause, operator="", module=path)):
            yield
    finally:
        if is_outermost:
            _current.names = None


# ---- events


@dataclass(slots=True)
class Event:
    """One collective, as one rank sees it."""

    rank: int
    """The global rank that called it."""
    kind: str
    """`all_reduce`, `all_gather`, ..."""
    axes: tuple[str, ...]
    """The axes of the mesh it runs over; empty for ranks that were listed one by one."""
    ranks: tuple[int, ...]
    """The global ranks that take part, in order."""
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """Of this rank's input; None where the input is no tensor."""
    bytes: int
    """The least number of bytes this rank receives from others; for objects set once it is
    known."""
    cause: Cause = field(default_factory=current_cause)
    """The operator, module and direction it serves."""
    started: float = field(default_factory=time.perf_counter)
    ended: float | None = None
    """When its result was waited for; None until then."""


Listener = Callable[[Event], None]

listeners: tuple[Listener, ...] = ()
_changing = threading.Lock()


def _watch_nothing(is_watched: bool) -> None:
    """Do nothing: module calls are not watched before `torch_patches` sets how."""


_watch_modules: Callable[[bool], None] = _watch_nothing


def watch_modules_with(watch: Callable[[bool], None] | None) -> None:
    """Set the function to call when the first listener comes and when the last one goes."""
    global _watch_modules
    with _changing:
        _watch_modules = watch or _watch_nothing
        _watch_modules(bool(listeners))


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Call `listener` with the `Event` of every collective that starts within this context.

    Simulated ranks are threads of one process, so the listener hears all of them.

    Example:
        >>> events = []
        >>> with listen(events.append):
        ...     pass
    """
    global listeners
    with _changing:
        listeners = (*listeners, listener)
        _watch_modules(True)
    try:
        yield
    finally:
        with _changing:
            at = len(listeners) - 1 - listeners[::-1].index(listener)
            listeners = listeners[:at] + listeners[at + 1 :]
            _watch_modules(bool(listeners))


def tell(event: Event) -> None:
    """Pass an event to every listener."""
    for listener in listeners:
        listener(event)


# ---- calls on DTensors


@contextmanager
def watch_calls(watcher: CallWatcher) -> Iterator[None]:
    """Hand every torch function on DTensors that this thread calls within to a watcher."""
    before, _current.call_watcher = _current.call_watcher, watcher
    try:
        with listen(_ignore):  # dispatch looks for a watcher only where somebody listens
            yield
    finally:
        _current.call_watcher = before


def call_watcher() -> CallWatcher | None:
    """Return the watcher of this thread's calls: another one can pass calls on to it."""
    return _current.call_watcher


def run_watched(func: Any, args: Any, kwargs: Any, run: Callable[[], T]) -> T:
    """Run a torch function on DTensors, through the watcher of this thread if there is one."""
    watcher = _current.call_watcher
    return run() if watcher is None else watcher(func, args, kwargs or {}, run)


def _ignore(event: Event) -> None:
    """Do nothing."""


def end_with(event: Event | None, pending: Pending[T]) -> Pending[T]:
    """Return the same pending result, which also records the end of the event when waited for."""
    if event is None:
        return pending

    def end(result: T) -> T:
        event.ended = time.perf_counter()
        return result

    return pending.then(end)


# ---- the line of the user's program

_PACKAGE = __name__.partition(".")[0]


def user_line() -> str:
    """Return the line outside this package and torch that called into it."""
    frame = sys._getframe()
    while frame.f_back is not None and _is_inside(frame.f_globals):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_inside(module: dict[str, Any]) -> bool:
    """Return whether these are the globals of a module of this package or of torch."""
    return str(module.get("__name__")).partition(".")[0] in (_PACKAGE, "torch")
