"""What can go wrong with sharded modules."""

from __future__ import annotations

from typing import Any

from shardwise.errors import CollectiveError, ShardwiseError


class FSDPError(ShardwiseError, ValueError):
    """An argument or a module that cannot be sharded so."""


class StateError(ShardwiseError, RuntimeError):
    """Something was asked of a sharded module at a time at which it cannot be done."""


class GatherError(CollectiveError):
    """Parameters could not be gathered, or gradients reduced; the message names them."""


ADVICE = (
    "Every rank of the mesh must call the same sharded modules in the same order; a rank that has "
    "no use for one calls it too, and multiplies its output by 0"
)


def check_bool(name: str, value: Any) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise FSDPError(f"{name}: expected True or False, got {value!r}")
