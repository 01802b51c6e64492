"""Errors of sharded modules, and the states that they and their parameters may be in."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, TypeVar

from shardwise.core.errors import CollectiveError, ShardwiseError


class FSDPError(ShardwiseError, ValueError):
    """An argument that is not accepted, or a module that cannot be sharded as asked."""


class StateError(ShardwiseError, RuntimeError):
    """A request that a sharded module cannot serve in its present state."""


class GatherError(CollectiveError):
    """A failed gather of parameters or reduction of gradients; the message names the modules."""


ADVICE = (
    "Every rank of the mesh must call the same sharded modules in the same order; a rank that has "
    "no use for one calls it too, and multiplies its output by 0"
)


def check_bool(name: str, value: Any) -> None:
    """Raise `FSDPError` unless an argument is True or False."""
    if not isinstance(value, bool):
        raise FSDPError(f"{name}: expected True or False, got {value!r}")


class TrainingState(Enum):
    """What the modules of a parameter group are doing."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    """Their backward has begun."""
    POST_BACKWARD = auto()
    """Their gradients are computed, and are being reduced."""


class ShardedState(Enum):
    """Whether the parameters of a unit are gathered."""

    SHARDED = auto()
    SHARDED_POST_FORWARD = auto()
    """Until backward, sharded over fewer ranks than at rest."""
    UNSHARDED = auto()


_T, _S = TrainingState, ShardedState
_SUCCESSORS: dict[Enum, tuple[Enum, ...]] = {
    _T.IDLE: (_T.FORWARD, _T.PRE_BACKWARD),
    _T.FORWARD: (_T.IDLE,),
    _T.PRE_BACKWARD: (_T.POST_BACKWARD, _T.IDLE),  # IDLE: backward brought no gradients
    # A module that is used twice has a second backward; a checkpoint may recompute it before that.
    _T.POST_BACKWARD: (_T.PRE_BACKWARD, _T.IDLE, _T.FORWARD),
    _S.SHARDED: (_S.UNSHARDED,),
    _S.UNSHARDED: (_S.SHARDED, _S.SHARDED_POST_FORWARD),
    _S.SHARDED_POST_FORWARD: (_S.UNSHARDED, _S.SHARDED),
}

AnyState = TypeVar("AnyState", TrainingState, ShardedState)


def transition(before: AnyState, after: AnyState, name: str) -> AnyState:
    """Return the state `after`, or raise `StateError` if it may not follow `before`.

    Arguments:
        name: whose states these are, for the error.
    """
    if after in _SUCCESSORS[before]:
        return after
    allowed = " or ".join(each.name for each in _SUCCESSORS[before])
    raise StateError(
        f"{name}: cannot go from {before.name} to {after.name}, only to {allowed}; after an "
        "exception call reset_iter_state() of the root module"
    )
