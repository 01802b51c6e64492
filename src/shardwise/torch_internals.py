"""The internals of torch that shardwise uses: a placeholder that knows of none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Internal:
    """An internal of torch, what it is used for, and how it differs from what is expected."""

    path: str
    purpose: str
    problem: str | None


def report() -> list[Internal]:
    """Return every internal of torch that shardwise uses."""
    return []
