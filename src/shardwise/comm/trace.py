"""The one point that every collective passes: who, what, on which axes, how many bytes, when, why.

Nothing is built while nobody listens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from shardwise.comm.cause import Cause, current
from shardwise.comm.pending import Pending

T = TypeVar("T")


@dataclass(slots=True)
class Event:
    """One collective, as one rank sees it."""

    rank: int
    """Who: the global rank that called it."""
    kind: str
    """What: `all_reduce`, `all_gather`, ..."""
    axes: tuple[str, ...]
    """Over which axes of the mesh; empty for ranks that were named one by one."""
    ranks: tuple[int, ...]
    """The global ranks that take part, in order."""
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """What this rank puts in; None where that is no tensor."""
    bytes: int
    """What this rank must receive from others, at the least; of objects, once it is known."""
    cause: Cause = field(default_factory=current)
    """Why: the operator, the module and the direction it is for."""
    started: float = field(default_factory=time.perf_counter)
    ended: float | None = None
    """When its result was waited for; None while it is under way."""


Listener = Callable[[Event], None]

listeners: tuple[Listener, ...] = ()
_changing = threading.Lock()


def _watch_nothing(is_watched: bool) -> None:
    """Modules are not watched before `torch_patches` says how."""


_watch_modules: Callable[[bool], None] = _watch_nothing


def watch_modules_with(watch: Callable[[bool], None] | None) -> None:
    """Set the function that is called when the first listener comes and when the last one goes."""
    global _watch_modules
    with _changing:
        _watch_modules = watch or _watch_nothing
        _watch_modules(bool(listeners))


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Call `listener` with the `Event` of every collective that starts, on any rank in here.

    A simulation's ranks are threads of one process: the listener hears all of them.

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
    """Pass an event to everybody who listens."""
    for listener in listeners:
        listener(event)


def ending(event: Event | None, pending: Pending[T]) -> Pending[T]:
    """The same result, which ends the event when it is waited for."""
    if event is None:
        return pending

    def end(result: T) -> T:
        event.ended = time.perf_counter()
        return result

    return pending.then(end)
