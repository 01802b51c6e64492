"""What dispatch keeps for each thread: the policies, and the calls it has planned.

Simulated ranks are threads, so neither a policy nor a plan of one reaches another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from shardwise.policy import Policy

MOST_ENTRIES = 16384


class CacheInfo(NamedTuple):
    """The state of this thread's cache of planned calls."""

    hits: int
    misses: int
    entries: int
    most_entries: int


class State(threading.local):
    """The policies and the planned calls of one thread."""

    def __init__(self) -> None:
        self.entries: dict[Any, Any] = {}
        self.misses = 0
        self.hits_of_forgotten = 0
        self.fallback = "warn"
        self._plain_tensors = "assume"
        self.explicit = False
        self.keeps_gathers = False
        """Whether tensors remember all that they were moved to, as they do pending sums."""
        self.heard: list[tuple[Any, Any]] | None = None
        """What inputs calls had moved, and how, if somebody wants to know."""
        self.warned: set[Any] = set()
        self.fallbacks: dict[str, int] = {}
        self.moved_parameters: dict[Any, Any] = {}
        """What parameters were moved to, until a backward has passed (see `moving`)."""
        self.moved_inputs: dict[Any, Any] = {}
        """The same for other leaves of the graph."""

    @property
    def plain_tensors(self) -> str:
        """What happens when a plain tensor meets a DTensor."""
        return self._plain_tensors

    @plain_tensors.setter
    def plain_tensors(self, policy: str) -> None:
        self._plain_tensors = policy
        self.entries.clear()  # what was planned may now be checked, or forbidden


state = State()


def cache_info() -> CacheInfo:
    """How this thread's cache of planned calls does: hits, misses, entries, and its limit."""
    hits = state.hits_of_forgotten + sum(entry.hits for entry in state.entries.values())
    return CacheInfo(hits, state.misses, len(state.entries), MOST_ENTRIES)


def cache_clear() -> None:
    """Forget this thread's planned calls, all statistics, and inputs kept for other uses."""
    state.entries.clear()
    state.moved_parameters.clear()
    state.moved_inputs.clear()
    state.fallbacks.clear()
    state.misses = state.hits_of_forgotten = 0


def remember(key: Any, entry: Any) -> None:
    """Keep a planned call; the oldest goes when there are too many."""
    if len(state.entries) >= MOST_ENTRIES:
        oldest = state.entries.pop(next(iter(state.entries)))
        state.hits_of_forgotten += oldest.hits
    state.entries[key] = entry


def fallback(policy: str) -> Policy:
    """What happens when an operator has no rule for a call, on this thread.

    The inputs are made whole and every rank runs the operator: always right, never fast.

    Arguments:
        policy: `"warn"` does so and says so, once for each operator and place (the default);
            `"replicate"` does so silently; `"error"` refuses.

    Example:
        >>> with sw.fallback("error"):
        ...     model(x)
    """
    return Policy(state, "fallback", policy, ("warn", "replicate", "error"))


def fallback_counts() -> dict[str, int]:
    """How often each operator made its inputs whole on this thread, as it has no rule for them."""
    return dict(state.fallbacks)


def plain_tensors(policy: str) -> Policy:
    """What happens when a plain tensor meets a DTensor in a call, on this thread.

    Arguments:
        policy: `"assume"` takes it for one that is the same on every rank (the default);
            `"check"` makes sure that it is, at the cost of a small collective each time: to find a
            mistake; `"error"` refuses it, unless it is 0-d.
    """
    return Policy(state, "plain_tensors", policy, ("assume", "check", "error"))


@contextmanager
def explicit() -> Iterator[None]:
    """Within, an operator that would communicate to make its inputs fit is an error.

    `redistribute`, `full_tensor` and the like are explicit, and allowed.
    """
    before, state.explicit = state.explicit, True
    try:
        yield
    finally:
        state.explicit = before
