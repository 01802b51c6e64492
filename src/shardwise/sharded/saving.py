"""The pickle of a sharded tensor: a rank's shards, and who it was among how many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.sharded.tensor import ShardedTensor

State = tuple[Any, ...]


def state_of(tensor: ShardedTensor) -> State:
    """What is saved."""
    return ()


def restore(tensor: ShardedTensor, state: State) -> None:
    """Become what was saved."""


def reduced(tensor: ShardedTensor) -> tuple[Any, ...]:
    """How it is pickled."""
    return ()
