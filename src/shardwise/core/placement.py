"""Placements: how one axis of a mesh holds a tensor (split, replicated, or pending a reduction)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from shardwise.core.box import chunk
from shardwise.core.checks import as_int, as_ints
from shardwise.core.cut import Cut
from shardwise.core.errors import LayoutError, also, format_value

if TYPE_CHECKING:
    from torch.distributed import ReduceOp as TorchReduceOp

REDUCE_OPS = ("sum", "avg", "max", "min", "product")


ReduceOp: TypeAlias = "str | TorchReduceOp | TorchReduceOp.RedOpType"
"""A reduction: a name, or torch's `ReduceOp`."""


class _PlacementType(type):
    """The type of placements: a placement of torch is an instance of ours of the same meaning."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if type.__instancecheck__(cls, instance):
            return True
        kind = type(instance)
        return _is_of_torch(kind) and issubclass(_OURS[kind.__name__], cls)


class Placement(metaclass=_PlacementType):
    """Base of `Shard`, `Replicate` and `Partial`. Immutable and hashable.

    A placement equals torch's placement of the same meaning, and has its hash; torch's is an
    instance of ours. Ours is no instance of torch's: C++ code would take its memory for its own.
    """

    __slots__ = ()

    def _values(self) -> tuple[Any, ...]:
        """Return the values that two equal placements of one type share."""
        return ()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            other = _from_torch(other)
        if type(other) is not type(self):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def is_shard(self, dim: int | None = None) -> bool:
        """Return whether this placement splits a tensor (along `dim`, if given)."""
        return False

    def is_replicate(self) -> bool:
        """Return whether every rank of the axis holds the same values."""
        return False

    def is_partial(self, reduce_op: ReduceOp | None = None) -> bool:
        """Return whether the value is pending a reduction (by `reduce_op`, if given)."""
        return False


@dataclass(frozen=True, slots=True, eq=False)
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
            raise also(LayoutError, TypeError)(
                f"Shard(dim): expected an int, got {_describe(self.dim)}"
            )
        object.__setattr__(self, "dim", dim)
        if self.pieces is not None or type(self.unit) is not int or self.unit != 1:
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

    @staticmethod
    def local_shard_size_and_offset(
        curr_local_size: int, num_chunks: int, rank: int
    ) -> tuple[int, int]:
        """Return the length of a chunk, by the rule of `torch.chunk`, and where it begins.

        Arguments:
            curr_local_size: the length that is split.
            num_chunks: the number of chunks.
            rank: which one.
        """
        start, stop = chunk(0, curr_local_size, num_chunks, rank)
        return stop - start, start

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
        return dim is None or as_int(dim) == self.dim

    def without_order(self) -> Shard:
        """Return the placement without its place among the axes that split the same dim."""
        return self

    def _values(self) -> tuple[Any, ...]:
        return self.dim, self.pieces, self.unit

    def __hash__(self) -> int:
        return hash(self.dim)

    def _shown_pieces(self) -> str:
        pieces = "" if self.pieces is None else f", pieces={self.pieces}"
        return pieces + ("" if self.unit == 1 else f", unit={self.unit}")

    def __repr__(self) -> str:
        return f"Shard({self.dim}{self._shown_pieces()})"


@dataclass(frozen=True, slots=True, eq=False, init=False, repr=False)
class _StridedShard(Shard):
    """A `Shard` whose axis is not in the order of the mesh among the axes that split `dim`.

    Axes that split one dim do so in the order of the mesh, the first one outermost. This placement
    says that later axes come before its own axis: as many as have `split_factor` chunks together.
    With tensor parallelism inside of data parallelism, `tp` splits the rows and `dp` splits each
    rank's rows further; on a mesh `(dp=4, tp=2)` the placements are
    `[_StridedShard(0, split_factor=2), Shard(0)]`.

    It has torch's name, arguments and text. The pieces are always those of nested chunks; torch's
    are others for some sizes that the axes do not divide.

    Arguments:
        dim: the dim of the tensor that is split.
        split_factor: the product of the sizes of the later axes that come first; or, if no other
            axis splits `dim`, the number of its pieces, as `Shard(dim, pieces=)`.
        sf: the same; torch's short name.
        pieces, unit: as for `Shard`.
    """

    split_factor: int = 1

    def __init__(
        self,
        dim: int,
        *,
        split_factor: int = 1,
        sf: int | None = None,
        pieces: int | Sequence[int] | None = None,
        unit: int | Sequence[int] = 1,
    ) -> None:
        Shard.__init__(self, dim, pieces, unit)
        factor = as_int(split_factor if sf is None else sf)
        if factor is None or factor < 1 or (sf is not None and split_factor not in (1, sf)):
            given = split_factor if sf is None or split_factor != 1 else sf
            raise LayoutError(
                f"_StridedShard(split_factor): expected one positive number, got {_describe(given)}"
            )
        object.__setattr__(self, "split_factor", factor)

    def without_order(self) -> Shard:
        return Shard(self.dim, self.pieces, self.unit)

    def _values(self) -> tuple[Any, ...]:
        return self.dim, self.pieces, self.unit, self.split_factor

    def __hash__(self) -> int:
        return hash((self.dim, self.split_factor))

    def __repr__(self) -> str:
        return f"_StridedShard(dim={self.dim}, sf={self.split_factor}{self._shown_pieces()})"


def _least(values: int | Sequence[int]) -> int:
    return values if isinstance(values, int) else min(values)


def shard_of_cut(dim: int, cut: Cut | None, split_factor: int = 1) -> Shard:
    """Return the shortest placement that gives this cut of a dim, and this place in the order."""
    pieces: int | tuple[int, ...] | None = None
    unit: int | tuple[int, ...] = 1
    if cut is not None:
        pieces, units = zip(*cut, strict=True)
        pieces = len(cut) if len(set(pieces)) == 1 else pieces
        unit = units[0] if len(set(units)) == 1 else units
    if split_factor == 1:
        return Shard(dim, pieces, unit)
    return _StridedShard(dim, split_factor=split_factor, pieces=pieces, unit=unit)


# ---- the order of several axes that split one dim


def split_factors(order: Sequence[int], sizes: Sequence[int]) -> dict[int, int]:
    """Return torch's view of an order of axes, outer to inner.

    For each axis: the product of the sizes of the axes that come before it, but later in the mesh.
    """
    return {
        axis: math.prod(sizes[each] for each in order[:at] if each > axis)
        for at, axis in enumerate(order)
    }


def order_by_factors(factors: Mapping[int, int], sizes: Sequence[int]) -> list[int] | None:
    """Return the order of axes that has these split factors; None if there is none.

    Axes of size 1 fit in several places, which give the same shards; they come as early as they
    can.
    """
    order: list[int] = []
    for axis in sorted(factors, reverse=True):
        outer = [math.prod(sizes[each] for each in order[:at]) for at in range(len(order) + 1)]
        if factors[axis] not in outer:
            return None
        order.insert(outer.index(factors[axis]), axis)
    return order


@dataclass(frozen=True, slots=True, eq=False)
class Replicate(Placement):
    """Every rank of the axis holds the same values."""

    def __hash__(self) -> int:
        return hash(-1)

    def is_replicate(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True, init=False, eq=False)
class Partial(Placement):
    """Each rank of the axis holds a contribution; the value is their reduction by `reduce_op`.

    Arguments:
        reduce_op: `"sum"`, `"avg"`, `"max"`, `"min"` or `"product"`, or the member of
            `torch.distributed.ReduceOp` with that name.
    """

    LINEAR_REDUCE_OPS: ClassVar[tuple[str, ...]] = ("sum", "avg")
    ALL_REDUCE_OPS: ClassVar[tuple[str, ...]] = REDUCE_OPS

    reduce_op: str = "sum"

    def __init__(self, reduce_op: ReduceOp = "sum") -> None:
        object.__setattr__(self, "reduce_op", as_reduce_op(reduce_op, "Partial(reduce_op)"))

    def _values(self) -> tuple[Any, ...]:
        return (self.reduce_op,)

    def __hash__(self) -> int:
        return 1 + hash(self.reduce_op)

    def is_partial(self, reduce_op: ReduceOp | None = None) -> bool:
        return reduce_op is None or name_of_reduce_op(reduce_op) == self.reduce_op

    def __repr__(self) -> str:
        return "Partial()" if self.reduce_op == "sum" else f"Partial({self.reduce_op!r})"


# ---- torch's placements, without importing them

_TORCHS_MODULE = "torch.distributed.tensor"
_OURS: dict[str, type[Placement]] = {
    kind.__name__: kind for kind in (Placement, Shard, _StridedShard, Replicate, Partial)
}
"""Our placements by the names of torch's."""


def _is_of_torch(kind: type) -> bool:
    return kind.__name__ in _OURS and kind.__module__.startswith(_TORCHS_MODULE)


def _from_torch(placement: Any) -> Placement | None:
    """Return the placement of shardwise for one of torch; None for anything else."""
    kind = type(placement)
    if not _is_of_torch(kind):
        return None
    match kind.__name__:
        case "Shard":
            return Shard(placement.dim)
        case "_StridedShard":
            return _StridedShard(placement.dim, split_factor=placement.split_factor)
        case "Partial":
            return Partial(placement.reduce_op)
    return Replicate()


def as_placement(placement: Any, argument: str) -> Placement:
    """Return a placement of shardwise for one of shardwise or torch; the error for anything else
    names the argument."""
    if issubclass(type(placement), (Shard, Replicate, Partial)):
        return placement  # type: ignore[no-any-return]
    found = _from_torch(placement)
    if found is None:
        raise LayoutError(
            f"{argument}: expected Shard, Replicate or Partial, got {_describe(placement)}"
        )
    return found


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
    kind = "type" if isinstance(value, type) else type(value).__name__
    return f"{format_value(value)} ({kind})"
