"""The state of dispatch on one thread: its policies and the cache of planned calls.

Simulated ranks are threads, so neither a policy nor a plan of one rank reaches another.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from shardwise.core.errors import PolicyError
from shardwise.core.tensor_state import leaf_moves

MOST_ENTRIES = 16384


class Policy:
    """Set an attribute at once; as a context manager, restore it at the end of the block.

    Arguments:
        holder: the thread-local object that has the attribute.
        field: the name of the attribute.
        value: the new value.
        allowed: all values that the attribute may have.
    """

    def __init__(self, holder: object, field: str, value: str, allowed: tuple[str, ...]) -> None:
        if value not in allowed:
            raise PolicyError(f"{field}: expected one of {', '.join(allowed)}; got {value!r}")
        self._holder, self._field = holder, field
        self._before: str = getattr(holder, field)
        setattr(holder, field, value)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        setattr(self._holder, self._field, self._before)


class CacheInfo(NamedTuple):
    """The state of this thread's cache of planned calls."""

    hits: int
    misses: int
    entries: int
    most_entries: int


class DispatchState(threading.local):
    """The policies and the planned calls of one thread."""

    def __init__(self) -> None:
        self.entries: dict[Any, Any] = {}
        """The planned calls (`CachedCall`), by key."""
        self.misses = 0
        self.hits_of_evicted = 0
        """The hits of calls that left the cache."""
        self.fallback = "warn"
        self._plain_tensors = "assume"
        self.explicit: ExplicitRedistributionContext | None = None
        """The innermost context that forbids implicit communication."""
        self.keeps_gathers = False
        """Whether tensors keep all their moved versions, and not only those without pending sums.
        The exporter of programs sets it."""
        self.move_log: list[tuple[Any, Any]] | None = None
        """A log of the inputs that calls moved, each with its `InputMove`, if a listener wants
        one."""
        self.warned: set[Any] = set()
        """The operators and lines that a `FallbackWarning` was given for."""
        self.fallbacks: dict[str, int] = {}
        """How often each operator fell back to replicated inputs."""

    @property
    def plain_tensors(self) -> str:
        """The policy for plain tensors beside DTensors."""
        return self._plain_tensors

    @plain_tensors.setter
    def plain_tensors(self, policy: str) -> None:
        self._plain_tensors = policy
        self.entries.clear()  # planned calls may now need a check, or be forbidden


state = DispatchState()


def cache_info() -> CacheInfo:
    """Return the hits, misses, size and limit of this thread's cache of planned calls."""
    hits = state.hits_of_evicted + sum(entry.hits for entry in state.entries.values())
    return CacheInfo(hits, state.misses, len(state.entries), MOST_ENTRIES)


def cache_clear() -> None:
    """Clear this thread's planned calls, all statistics, and the inputs kept for other uses."""
    state.entries.clear()
    leaf_moves.clear()
    state.fallbacks.clear()
    state.misses = state.hits_of_evicted = 0


def add_to_cache(key: Any, call: Any) -> None:
    """Put a planned call into the cache; the oldest leaves when the cache is full."""
    if len(state.entries) >= MOST_ENTRIES:
        oldest = state.entries.pop(next(iter(state.entries)))
        state.hits_of_evicted += oldest.hits
    state.entries[key] = call


def fallback(policy: str) -> Policy:
    """Set, on this thread, what happens when an operator has no rule for a call.

    A fallback replicates the inputs and every rank runs the operator: always right, never fast.

    Arguments:
        policy: `"warn"` falls back with a warning, once for each operator and line (the default);
            `"replicate"` falls back silently; `"error"` refuses.

    Example:
        >>> with sw.fallback("error"):
        ...     model(x)
    """
    return Policy(state, "fallback", policy, ("warn", "replicate", "error"))


def fallback_counts() -> dict[str, int]:
    """Return how often each operator without a rule replicated its inputs on this thread."""
    return dict(state.fallbacks)


def plain_tensors(policy: str) -> Policy:
    """Set, on this thread, what happens when a plain tensor meets a DTensor in a call.

    Arguments:
        policy: `"assume"` takes it for the same on every rank (the default); `"check"` compares
            the ranks, at the cost of a small collective each time: to find a mistake; `"error"`
            refuses it, unless it is 0-d.
    """
    return Policy(state, "plain_tensors", policy, ("assume", "check", "error"))


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Return a context in which plain tensors beside DTensors are taken as replicated.

    That is what `plain_tensors("assume")`, the default, does. torch refuses plain tensors without
    this context.
    """
    with plain_tensors("assume"):
        yield


def explicit() -> ExplicitRedistributionContext:
    """Return a context in which an operator that would communicate to move its inputs is refused.

    Calls that ask for communication, such as `redistribute` and `full_tensor`, are allowed.
    """
    return ExplicitRedistributionContext()


class ExplicitRedistributionContext:
    """A context in which operators do not move their inputs implicitly: torch's form of
    `explicit`.

    Arguments:
        enable: False allows implicit moves again, within another such context.
        strict: refuse moves without communication too.
        mode: "raise" an error, or "warn".
    """

    def __init__(self, enable: bool = True, strict: bool = False, mode: str = "raise") -> None:
        if mode not in ("raise", "warn"):
            raise PolicyError(f"mode: expected 'raise' or 'warn', got {mode!r}")
        self._enable, self.strict, self._mode = enable, strict, mode
        self._before: list[ExplicitRedistributionContext | None] = []

    def __enter__(self) -> ExplicitRedistributionContext:
        self._before.append(state.explicit)
        state.explicit = self if self._enable else None
        return self

    def __exit__(self, *exception: object) -> None:
        state.explicit = self._before.pop()

    def refuse(self, message: str) -> None:
        """Raise an error about an implicit move, or warn of it."""
        if self._mode == "raise":
            raise PolicyError(message)
        warnings.warn(message, stacklevel=2)
