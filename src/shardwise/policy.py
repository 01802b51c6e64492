"""Policies: settings of a thread, for good or for a `with` block."""

from __future__ import annotations

from shardwise.errors import ShardwiseError


class PolicyError(ShardwiseError, ValueError):
    """A policy that does not exist, or one that forbids what was about to happen."""


class Policy:
    """A setting that holds at once, and until the end of a `with` block, if it is used as one.

    Arguments:
        holder: what has the setting, for each thread its own.
        field: the attribute's name.
        value: what it should be.
        allowed: what it may be.
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
