"""Settings of one thread, set permanently or for a `with` block."""

from __future__ import annotations

from shardwise.core.errors import ShardwiseError


class PolicyError(ShardwiseError, ValueError):
    """An unknown policy, or an action that the current policy forbids."""


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
