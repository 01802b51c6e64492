"""What a group of parameters is doing, and where its parameters are; and what may follow what."""

from __future__ import annotations

from enum import Enum, auto
from typing import TypeVar

from shardwise.fsdp.errors import StateError


class TrainingState(Enum):
    """What the modules of a group are doing."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    """Their backward has begun."""
    POST_BACKWARD = auto()
    """Their gradients are there, and on their way to the shards."""


class ShardedState(Enum):
    """Where parameters are."""

    SHARDED = auto()
    SHARDED_POST_FORWARD = auto()
    """Split over fewer ranks than they are at rest, until backward."""
    UNSHARDED = auto()


_T, _S = TrainingState, ShardedState
_MAY_FOLLOW: dict[Enum, tuple[Enum, ...]] = {
    _T.IDLE: (_T.FORWARD, _T.PRE_BACKWARD),
    _T.FORWARD: (_T.IDLE,),
    _T.PRE_BACKWARD: (_T.POST_BACKWARD, _T.IDLE),  # no gradients came: at once to the end
    # Used twice: its backward begins again, and before that a checkpoint may compute it anew.
    _T.POST_BACKWARD: (_T.PRE_BACKWARD, _T.IDLE, _T.FORWARD),
    _S.SHARDED: (_S.UNSHARDED,),
    _S.UNSHARDED: (_S.SHARDED, _S.SHARDED_POST_FORWARD),
    _S.SHARDED_POST_FORWARD: (_S.UNSHARDED, _S.SHARDED),
}

State = TypeVar("State", TrainingState, ShardedState)


def moved_on(before: State, after: State, name: str) -> State:
    """The state that follows, or an error that names both.

    Arguments:
        name: whose states these are.
    """
    if after in _MAY_FOLLOW[before]:
        return after
    allowed = " or ".join(each.name for each in _MAY_FOLLOW[before])
    raise StateError(
        f"{name}: cannot go from {before.name} to {after.name}, only to {allowed}; after an "
        "exception call reset_iter_state() of the root module"
    )
