"""The exceptions of shardwise: one base, a few meaningful children. And one warning.

Every message says what was expected, what came and what to do. The rank it happened on is added
here, so that no caller has to remember it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

whereabouts: Callable[[], str] = str
"""Says which rank this is, or nothing. `shardwise.world` fills it in."""


class ShardwiseError(Exception):
    """Base of every error that shardwise raises on purpose."""

    names_rank = True
    """Whether the message ends with the rank it was raised on."""

    def __init__(self, message: str) -> None:
        here = whereabouts() if self.names_rank else ""
        told = not here or message.endswith(f"[{here}]")  # by the error that this one is about
        super().__init__(message if told else f"{message} [{here}]")

    def __reduce__(self) -> tuple[Any, ...]:
        # Not by calling the class again: the rank in the message is where it was raised first.
        return _rebuilt, (type(self), self.args, vars(self))


class MeshError(ShardwiseError, ValueError):
    """A device mesh that cannot be, or a question it cannot answer."""


class LayoutError(ShardwiseError, ValueError):
    """A placement or layout that does not fit its mesh or its tensor."""


class DispatchError(ShardwiseError, RuntimeError):
    """A call that has no meaning on distributed tensors, or would change a layout in place."""


class CollectiveError(ShardwiseError, RuntimeError):
    """A collective with unfit arguments, or one that failed under way."""


class MismatchError(CollectiveError):
    """Ranks that do not meet in the same collective. The message names them all."""

    names_rank = False


class LaunchError(ShardwiseError, RuntimeError):
    """Ranks could not be started, or had to be stopped."""


class RankError(LaunchError):
    """A rank failed. `rank` says which; its traceback is in the message."""

    names_rank = False

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class TorchVersionWarning(UserWarning):
    """shardwise is not tested with this version of torch."""


def _rebuilt(
    kind: type[ShardwiseError], arguments: tuple[Any, ...], fields: dict[str, Any]
) -> ShardwiseError:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    vars(error).update(fields)
    return error
