"""The exceptions of shardwise, all derived from `ShardwiseError`, and one warning.

Every message says what was expected, what was given and how to correct it. The base class adds the
rank on which the error was raised, so the code that raises does not.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any, TypeVar

whereabouts: Callable[[], str] = str
"""Return which rank this is as text, or "" outside a distributed program. `world` sets it."""


_Kind = TypeVar("_Kind", bound="ShardwiseError")

_MOST_SHOWN = 2000
"""The most characters of a value that a message quotes."""


def format_value(value: object) -> str:
    """Return the text of a value for a message: its repr, if it has one that can be read."""
    try:
        text = repr(value)
    except Exception:  # such as an int of 5,000 digits, also inside of a list
        return f"a value of type {type(value).__name__} that cannot be printed"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


class ShardwiseError(Exception):
    """Base of every error that shardwise raises on purpose."""

    names_rank = True
    """Whether the message ends with the rank it was raised on."""

    def __init__(self, message: str) -> None:
        rank = whereabouts() if self.names_rank else ""
        # An error that quotes another one may end with the rank already.
        is_named = not rank or message.endswith(f"[{rank}]")
        super().__init__(message if is_named else f"{message} [{rank}]")

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError would quote it

    def __reduce__(self) -> tuple[Any, ...]:
        # Calling the class again would add the rank that unpickles the error to the message.
        return _rebuilt, (type(self), self.args, vars(self))


class MeshError(ShardwiseError, ValueError, RuntimeError):
    """A device mesh that cannot be made, or a mesh that does not have what was asked for.

    Torch raises ValueError for some of these and RuntimeError for others.
    """


class LayoutError(ShardwiseError, ValueError, RuntimeError):
    """A placement or layout that does not fit its mesh or its tensor.

    Torch raises ValueError for some of these and RuntimeError for others.
    """


class DispatchError(ShardwiseError, RuntimeError):
    """A call that is not defined for DTensors, or that would change a layout in place."""


class PolicyError(ShardwiseError, ValueError):
    """An unknown policy, or an action that the current policy forbids."""


class CollectiveError(ShardwiseError, RuntimeError):
    """A collective with wrong arguments, or one that failed while it ran."""


class MismatchError(CollectiveError):
    """Ranks that call different collectives. The message names all of them."""

    names_rank = False


class LaunchError(ShardwiseError, RuntimeError):
    """Ranks could not be started, or had to be stopped."""


class RankError(LaunchError):
    """The failure of one rank: `rank` is its number, and the message has its traceback."""

    names_rank = False

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class ExportError(ShardwiseError, ValueError):
    """A program, plan or mesh from which no rank's program can be made."""


class ShardedTensorError(ShardwiseError, ValueError):
    """Shards, specs or arguments that do not form a tensor, or an operator that the shards do not
    allow."""


class ShardedStateError(ShardwiseError, RuntimeError):
    """Missing or wrong surroundings of a tensor: process groups, RPC, a saved state."""


class TorchVersionWarning(UserWarning):
    """shardwise is not tested with this version of torch."""


def also(kind: type[_Kind], *builtins: type[Exception]) -> type[_Kind]:
    """Return an error class of shardwise as one that derives from some of Python's as well.

    For calls for which torch raises those: code that catches them goes on working.

    Example:
        >>> raise also(LayoutError, TypeError)("placements: expected a list, got 3")
    """
    bases = (kind, *(each for each in builtins if not issubclass(kind, each)))
    if len(bases) == 1:
        return kind
    if bases not in _combined:
        _combined[bases] = _combine(*bases)
    return _combined[bases]  # type: ignore[no-any-return]


_combined: dict[tuple[type, ...], Any] = {}


class _Combined(type):
    """The type of classes made by `also`, which are pickled as the call that makes them."""


def _pickle_combined(kind: Any) -> Any:
    return also, kind.__bases__


copyreg.pickle(_Combined, _pickle_combined)


def _combine(kind: type, *builtins: type) -> type:
    # Tracebacks show the name of the documented class.
    fields = {name: getattr(kind, name) for name in ("__doc__", "__module__", "__qualname__")}
    return _Combined(kind.__name__, (kind, *builtins), fields)


def _rebuilt(
    kind: type[ShardwiseError], arguments: tuple[Any, ...], fields: dict[str, Any]
) -> ShardwiseError:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    vars(error).update(fields)
    return error
