"""Placements: how a tensor lies along one axis of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwise.checks import as_int
from shardwise.errors import LayoutError

REDUCE_OPS = ("sum", "avg", "max", "min", "product")


class Placement:
    """Base of `Shard`, `Replicate` and `Partial`. Immutable and hashable."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this splits a tensor (along `dim`, if given)."""
        return False

    def is_replicate(self) -> bool:
        """Whether every rank of the axis holds the same."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether the value is pending a reduction (by `reduce_op`, if given)."""
        return False


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """The tensor is split along `dim` over the axis, by the rules of `torch.chunk`.

    A negative `dim` counts from the end; it is resolved where the tensor is known.
    """

    dim: int

    def __post_init__(self) -> None:
        dim = as_int(self.dim)
        if dim is None:
            raise LayoutError(f"Shard(dim): expected an int, got {_shown(self.dim)}")
        object.__setattr__(self, "dim", dim)

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank of the axis holds the same."""

    def is_replicate(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Each rank of the axis holds a contribution; the value is their reduction by `reduce_op`."""

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        check_reduce_op(self.reduce_op, "Partial(reduce_op)")

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op

    def __repr__(self) -> str:
        return "Partial()" if self.reduce_op == "sum" else f"Partial({self.reduce_op!r})"


_FROM_TORCH: dict[str, Callable[[Any], Placement]] = {
    "Shard": lambda theirs: Shard(theirs.dim),
    "Replicate": lambda theirs: Replicate(),
    "Partial": lambda theirs: Partial(theirs.reduce_op),
}


def as_placement(placement: Any, argument: str) -> Placement:
    """What every function that takes placements calls first: torch's are welcome too.

    Anything else is refused, torch's `_StridedShard` and the like too, naming the argument.
    """
    if isinstance(placement, Shard | Replicate | Partial):
        return placement
    kind = type(placement)
    ours = _FROM_TORCH.get(kind.__name__)
    if ours is not None and kind.__module__.startswith("torch.distributed.tensor"):
        return ours(placement)
    raise LayoutError(f"{argument}: expected Shard, Replicate or Partial, got {_shown(placement)}")


def check_reduce_op(op: object, argument: str) -> None:
    """Refuse an unknown reduction, naming the argument it came in."""
    if op not in REDUCE_OPS:
        raise LayoutError(f"{argument}: expected one of {', '.join(REDUCE_OPS)}, got {_shown(op)}")


def _shown(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"
