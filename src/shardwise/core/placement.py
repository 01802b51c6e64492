"""Placements: how one axis of a mesh holds a tensor (split, replicated, or pending a reduction)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from shardwise.core.checks import as_int, as_ints
from shardwise.core.cut import Cut
from shardwise.core.errors import LayoutError

if TYPE_CHECKING:
    from torch.distributed import ReduceOp as TorchReduceOp

REDUCE_OPS = ("sum", "avg", "max", "min", "product")


ReduceOp: TypeAlias = "str | TorchReduceOp | TorchReduceOp.RedOpType"
"""A reduction: a name, or torch's `ReduceOp`."""


class Placement:
    """Base of `Shard`, `Replicate` and `Partial`. Immutable and hashable."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Return whether this placement splits a tensor (along `dim`, if given)."""
        return False

    def is_replicate(self) -> bool:
        """Return whether every rank of the axis holds the same values."""
        return False

    def is_partial(self, reduce_op: ReduceOp | None = None) -> bool:
        """Return whether the value is pending a reduction (by `reduce_op`, if given)."""
        return False


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """The tensor is split along `dim` over the axis, by the rules of `torch.chunk`.

    A negative `dim` counts from the end; it is resolved where the tensor is known.

    Arguments:
        dim: the dim of the tensor that is split.
        pieces: the number of equal pieces that the dim consists of, or their lengths. Each piece is
            split on its own, as a fused projection (queries, keys and values) needs it.
        unit: the length that is never split, such as the features of one head: one for all pieces,
            or one for each.

    Example:
        >>> Shard(0, pieces=(24, 12, 12), unit=(8, 4, 4))  # 6 heads of 4 that share 3, in groups
    """

    dim: int
    pieces: int | Sequence[int] | None = None
    unit: int | Sequence[int] = 1

    def __post_init__(self) -> None:
        dim = as_int(self.dim)
        if dim is None:
            raise LayoutError(f"Shard(dim): expected an int, got {_describe(self.dim)}")
        object.__setattr__(self, "dim", dim)
        if self.pieces is not None or self.unit != 1:
            self._check_pieces()

    def _check_pieces(self) -> None:
        pieces = None if self.pieces is None else as_int(self.pieces) or as_ints(self.pieces)
        if self.pieces is not None and (not pieces or _least(pieces) < (type(pieces) is int)):
            raise LayoutError(
                f"Shard(pieces): expected a number of pieces or their lengths, "
                f"got {_describe(self.pieces)}"
            )
        unit = as_int(self.unit) or as_ints(self.unit)
        if not unit or _least(unit) < 1:
            raise LayoutError(
                f"Shard(unit): expected a length, or one per piece; got {_describe(self.unit)}"
            )
        if isinstance(unit, tuple):
            count = len(pieces) if isinstance(pieces, tuple) else pieces or 1
            if len(unit) != count:
                raise LayoutError(
                    f"Shard(unit): expected {count} lengths, one per piece; got {self.unit!r}"
                )
            unit = unit[0] if len(set(unit)) == 1 else unit
        object.__setattr__(self, "pieces", None if pieces == 1 else pieces)
        object.__setattr__(self, "unit", unit)

    def cut(self, size: int, argument: str) -> Cut | None:
        """Return the pieces of a dim of this size; None if the dim is not cut in pieces."""
        if self.pieces is None and self.unit == 1:
            return None
        if isinstance(self.pieces, Sequence):
            lengths = list(self.pieces)
            if sum(lengths) != size:
                raise LayoutError(
                    f"{argument}: expected pieces that make up dim {self.dim}, of size {size}; "
                    f"got {'+'.join(map(str, lengths))} = {sum(lengths)}"
                )
        else:
            count = self.pieces or 1
            if size % count:
                raise LayoutError(
                    f"{argument}: expected a dim {self.dim} that {count} pieces divide, got size "
                    f"{size}; give their lengths"
                )
            lengths = [size // count] * count
        units = list(self.unit) if isinstance(self.unit, Sequence) else [self.unit] * len(lengths)
        for length, unit in zip(lengths, units, strict=True):
            if length % unit:
                raise LayoutError(
                    f"{argument}: expected pieces of whole units, got a piece of {length} of "
                    f"units of {unit}"
                )
        return tuple(zip(lengths, units, strict=True))

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def __repr__(self) -> str:
        pieces = "" if self.pieces is None else f", pieces={self.pieces}"
        unit = "" if self.unit == 1 else f", unit={self.unit}"
        return f"Shard({self.dim}{pieces}{unit})"


def _least(values: int | Sequence[int]) -> int:
    return values if isinstance(values, int) else min(values)


def shard_of_cut(dim: int, cut: Cut) -> Shard:
    """Return the shortest placement that gives this cut of a dim."""
    lengths, units = zip(*cut, strict=True)
    pieces: int | tuple[int, ...] | None = lengths
    if len(set(lengths)) == 1:
        pieces = len(cut)
    return Shard(dim, pieces, units[0] if len(set(units)) == 1 else units)


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank of the axis holds the same values."""

    def is_replicate(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True, init=False)
class Partial(Placement):
    """Each rank of the axis holds a contribution; the value is their reduction by `reduce_op`.

    Arguments:
        reduce_op: `"sum"`, `"avg"`, `"max"`, `"min"` or `"product"`, or the member of
            `torch.distributed.ReduceOp` with that name.
    """

    reduce_op: str = "sum"

    def __init__(self, reduce_op: ReduceOp = "sum") -> None:
        object.__setattr__(self, "reduce_op", as_reduce_op(reduce_op, "Partial(reduce_op)"))

    def is_partial(self, reduce_op: ReduceOp | None = None) -> bool:
        return reduce_op is None or name_of_reduce_op(reduce_op) == self.reduce_op

    def __repr__(self) -> str:
        return "Partial()" if self.reduce_op == "sum" else f"Partial({self.reduce_op!r})"


_FROM_TORCH: dict[str, Callable[[Any], Placement]] = {
    "Shard": lambda theirs: Shard(theirs.dim),
    "Replicate": lambda theirs: Replicate(),
    "Partial": lambda theirs: Partial(theirs.reduce_op),
}


def as_placement(placement: Any, argument: str) -> Placement:
    """Return a placement of shardwise for one of shardwise or torch.

    Anything else is refused, torch's `_StridedShard` included; the error names the argument.
    """
    if isinstance(placement, Shard | Replicate | Partial):
        return placement
    kind = type(placement)
    ours = _FROM_TORCH.get(kind.__name__)
    if ours is not None and kind.__module__.startswith("torch.distributed.tensor"):
        return ours(placement)
    raise LayoutError(
        f"{argument}: expected Shard, Replicate or Partial, got {_describe(placement)}"
    )


def name_of_reduce_op(op: object) -> str | None:
    """Return the name of a reduction given by name or as torch's `ReduceOp`; None if unknown."""
    if isinstance(op, str):
        return op if op in REDUCE_OPS else None
    member: Any = getattr(op, "op", op)  # ReduceOp.SUM and the others are members of an enumeration
    if type(member).__name__ != "RedOpType":
        return None
    name = str(member.name).lower()
    return name if name in REDUCE_OPS else None


def as_reduce_op(op: object, argument: str) -> str:
    """Return the name of a reduction; an unknown one is refused with the name of the argument."""
    name = name_of_reduce_op(op)
    if name is None:
        raise LayoutError(
            f"{argument}: expected one of {', '.join(REDUCE_OPS)}, got {_describe(op)}"
        )
    return name


def _describe(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"
