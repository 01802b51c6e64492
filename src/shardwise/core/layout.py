"""Layout: the distribution of one global tensor over one mesh.

A layout has the mesh, the global shape, for every dim the *ordered* axes that split it (outer to
inner) and optionally the pieces that are split one by one (`shardwise.core.cut`), and the axes with
a pending reduction. It is immutable and interned: equal layouts are one object, so comparing and
hashing are free, and a layout can be a key of a cache. Every method computes on one coordinate of
the mesh; none communicates.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from shardwise.core import cut as cuts_of
from shardwise.core import layout_input
from shardwise.core.box import Box, Range, chunk
from shardwise.core.cut import Cut
from shardwise.core.errors import LayoutError, also, format_value
from shardwise.core.layout_input import (
    as_cuts,
    as_dim,
    as_order,
    as_shape,
    placed_cut,
    placed_order,
)
from shardwise.core.mesh import Axis, DeviceMesh, as_mesh
from shardwise.core.placement import (
    Partial,
    Placement,
    ReduceOp,
    Replicate,
    Shard,
    _StridedShard,
    as_placement,
    as_reduce_op,
    order_by_factors,
    shard_of_cut,
    split_factors,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

_interned: WeakValueDictionary[tuple[Any, ...], Layout] = WeakValueDictionary()
_interning = threading.Lock()
_FIELDS = (
    "mesh",
    "shape",
    "shard_order",
    "partial",
    "cuts",
    "placements",
    "size",
    "numel",
    "is_cut",
)


class Layout:
    """The distribution of one global tensor over one mesh.

    Arguments:
        mesh: the ranks that hold the tensor.
        shape: the global shape.
        shard_order: for each dim, the axes that split it, outer to inner. May be a mapping that
            names only the dims that are split.
        partial: the pending reduction of each axis that has one.
        cuts: for each dim the pieces that are split one by one, as (length, unit), or None. May be
            a mapping that names only the dims that are cut.

    Example:
        >>> mesh = DeviceMesh.abstract((2, 4), ("dp", "tp"))
        >>> layout = Layout(mesh, (8, 6), shard_order={0: ["tp", "dp"]})
        >>> layout
        [8@tp.dp, 6]
        >>> layout.local_shape((1, 3))
        (1, 6)
    """

    __slots__ = ("__weakref__", *_FIELDS)

    mesh: DeviceMesh
    shape: tuple[int, ...]
    shard_order: tuple[tuple[int, ...], ...]
    """For each dim the positions of the axes that split it, outer to inner."""
    partial: tuple[tuple[int, str], ...]
    """The positions of the axes with a pending reduction, ascending, each with its op."""
    cuts: tuple[Cut | None, ...]
    """For each dim its pieces, as (length, unit); None for a dim that is not cut."""
    placements: tuple[Placement, ...]
    """The placement of each axis, as in torch; `Layout.from_placements` gives the layout again."""
    size: torch.Size
    """The global shape, as torch's own type."""
    numel: int
    """The number of elements of the global tensor."""
    is_cut: bool
    """Whether some dim is cut in pieces, so that a rank may hold several boxes."""

    def __new__(
        cls,
        mesh: DeviceMesh | TorchMesh,
        shape: Sequence[int],
        shard_order: Sequence[Sequence[Axis]] | Mapping[int, Sequence[Axis]] = (),
        partial: Mapping[Axis, ReduceOp] | None = None,
        cuts: Sequence[Cut | None] | Mapping[int, Cut | None] = (),
    ) -> Layout:
        mesh, shape = as_mesh(mesh), as_shape(shape)
        order = _canonical_order(mesh, as_order(mesh, shape, shard_order))
        if partial is not None and not isinstance(partial, Mapping):
            raise LayoutError(
                f"partial: expected such as {{'pp': 'sum'}}, got {format_value(partial)}"
            )
        pending = _as_pending((mesh.axis(axis), op) for axis, op in (partial or {}).items())
        has_cuts = cuts is not None and not (isinstance(cuts, tuple) and not cuts)
        return _intern(mesh, shape, order, pending, as_cuts(shape, cuts) if has_cuts else None)

    @staticmethod
    def from_placements(
        mesh: DeviceMesh | TorchMesh,
        shape: Sequence[int],
        placements: Sequence[Placement],
        shard_order: Sequence[Sequence[Axis]] | Mapping[int, Sequence[Axis]] | None = None,
    ) -> Layout:
        """Return the layout with these placements, one per axis of the mesh.

        Arguments:
            placements: of shardwise or of torch.
            shard_order: for each dim that several axes split, those axes outer to inner. By
                default in the order of the mesh, as in torch, unless a placement says otherwise
                (`_StridedShard`).
        """
        mesh, shape = as_mesh(mesh), as_shape(shape)
        is_list = isinstance(placements, Sequence)
        if not is_list or len(placements) != mesh.ndim:
            raise (LayoutError if is_list else also(LayoutError, TypeError))(
                f"placements: expected a list of {mesh.ndim}, one per axis of {mesh!r}; "
                f"got {format_value(placements)}"
            )
        placements = [as_placement(each, f"placements[{i}]") for i, each in enumerate(placements)]
        split: dict[int, dict[int, Shard]] = {}
        partial: dict[Axis, str] = {}
        for axis, placement in enumerate(placements):
            match placement:
                case Shard(dim):
                    dim = as_dim(dim, len(shape), f"placements[{axis}] = {placement}")
                    split.setdefault(dim, {})[axis] = placement
                case Partial(reduce_op):
                    partial[axis] = reduce_op
        cuts = {dim: placed_cut(shape[dim], dim, shards) for dim, shards in split.items()}
        order = {dim: placed_order(mesh, dim, shards) for dim, shards in split.items()}
        if shard_order is None:
            return Layout(mesh, shape, order, partial, cuts)
        asked = _canonical_order(mesh, as_order(mesh, shape, shard_order))
        for dim, axes in enumerate(asked):
            found = order.get(dim, ())
            is_told = any(isinstance(each, _StridedShard) for each in split.get(dim, {}).values())
            if axes and (sorted(axes) != sorted(found) or (is_told and axes != found)):
                raise LayoutError(
                    f"shard_order[{dim}]: expected the axes that placements {tuple(placements)} "
                    f"split dim {dim} over, {_format_axes(mesh, found)}; "
                    f"got {_format_axes(mesh, axes)}"
                )
            order[dim] = axes or found
        return Layout(mesh, shape, order, partial, cuts)

    @staticmethod
    def parse(text: str, mesh: DeviceMesh | TorchMesh) -> Layout:
        """Return the layout that `repr` writes as `text`: `Layout.parse(repr(x), x.mesh) is x`.

        Example:
            >>> mesh = DeviceMesh.abstract((2, 2, 2), ("dp", "tp", "pp"))
            >>> Layout.parse("[8@dp.tp, 128] +sum@pp", mesh).local_shape((0, 1, 0))
            (2, 128)
        """
        mesh = as_mesh(mesh)
        return Layout(mesh, *layout_input.parse_layout(text, mesh))

    def relaid(
        self,
        shard_order: Iterable[Iterable[int]] | None = None,
        partial: Mapping[int, ReduceOp] | None = None,
        cuts: tuple[Cut | None, ...] | None = None,
    ) -> Layout:
        """Return another layout of the same tensor on the same mesh. Axes are positions.

        Arguments:
            shard_order: for each dim the axes that split it; by default unchanged.
            partial: the pending reductions; by default unchanged.
            cuts: for each dim its pieces; by default unchanged for dims whose axes stay the same,
                and None for the others.
        """
        order = self.shard_order
        if shard_order is not None:
            order = _canonical_order(self.mesh, tuple(map(tuple, shard_order)))
        pending = self.partial if partial is None else _as_pending(partial.items())
        if cuts is None and self.is_cut:
            each = zip(self.cuts, self.shard_order, order, strict=True)
            cuts = tuple(cut if before == after else None for cut, before, after in each)
        return _intern(self.mesh, self.shape, order, pending, cuts)

    # ---- what a rank holds

    def box(self, coordinate: Sequence[int] | None = None) -> Box:
        """Return the indices of the global tensor held at `coordinate` (default: this rank)."""
        place = self._place(coordinate)
        start, stop = [], []
        for dim, (size, axes) in enumerate(zip(self.shape, self.shard_order, strict=True)):
            first, end = 0, size
            if self.is_cut and self.cuts[dim] is not None:
                first, end = self.range(dim, place)
            else:
                for axis in axes:
                    first, end = chunk(first, end, self.mesh.shape[axis], place[axis])
            start.append(first)
            stop.append(end)
        return Box(tuple(start), tuple(stop))

    def ranges(self, dim: int, coordinate: Sequence[int] | None = None) -> list[Range]:
        """Return the indices along one dim held at `coordinate` (default: this rank), ascending.

        A dim that is not cut gives one range. A dim that is cut gives one range per piece; empty
        ranges are dropped, and ranges that touch are merged.
        """
        place = self._place(coordinate)
        axes, cut = self.shard_order[dim], self.cuts[dim]
        counts = [self.mesh.shape[axis] for axis in axes]
        pieces = ((self.shape[dim], 1),) if cut is None else cut
        return cuts_of.merge_ranges(cuts_of.shares(pieces, counts, [place[axis] for axis in axes]))

    def range(self, dim: int, coordinate: Sequence[int] | None = None) -> Range:
        """Return the one range of a dim held at `coordinate`; refused for a dim of several
        pieces."""
        cut = self.cuts[dim]
        if cut is not None and len(cut) > 1:  # refused on all ranks, whether they hold one or not
            raise LayoutError(
                f"dim {dim} of {self!r}: a rank may hold several ranges of it, here "
                f"{self.ranges(dim, coordinate)}, and one is needed; use layout.boxes(), or "
                f"redistribute it to Shard({dim}) first"
            )
        return self.ranges(dim, coordinate)[0]

    def boxes(self, coordinate: Sequence[int] | None = None) -> list[tuple[Box, Box]]:
        """Return the boxes held at `coordinate` (default: this rank).

        Each is a pair: the box in the global tensor, and its place in the local one. There is one,
        possibly empty, unless a dim is cut in pieces.
        """
        if not self.is_cut:
            box = self.box(coordinate)
            return [(box, Box((0,) * self.ndim, box.shape))]
        along = []
        for dim in range(self.ndim):
            ranges, offset = [], 0
            for start, stop in self.ranges(dim, coordinate):
                ranges.append(((start, stop), (offset, offset + stop - start)))
                offset += stop - start
            along.append(ranges)
        found = []
        for choice in product(*along):
            there = zip(*(each[0] for each in choice), strict=True)
            here = zip(*(each[1] for each in choice), strict=True)
            found.append((Box(*there), Box(*here)))
        return found

    def local_shape(self, coordinate: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return the shape of the shard held at `coordinate` (default: this rank)."""
        if not self.is_cut:
            return self.box(coordinate).shape
        place = self._place(coordinate)
        return tuple(
            sum(stop - start for start, stop in self.ranges(dim, place)) for dim in range(self.ndim)
        )

    def piece_of(
        self, whole: torch.Tensor, coordinate: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Take the shard held at `coordinate` (default: this rank) out of a whole tensor.

        The result is a view, or a copy if the shard consists of several boxes.
        """
        if not self.is_cut:
            return whole[self.box(coordinate).slices]
        for dim in range(self.ndim):
            whole = cuts_of.take_ranges(whole, dim, self.ranges(dim, coordinate))
        return whole

    @property
    def ndim(self) -> int:
        """The number of dims of the tensor."""
        return len(self.shape)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return not self.partial and not any(self.shard_order)

    @property
    def is_whole(self) -> bool:
        """Whether each shard is the whole tensor: replicated, or spread over axes of one rank."""
        sizes = self.mesh.shape
        axes = {axis for axis, _ in self.partial}.union(*self.shard_order)
        return all(sizes[axis] == 1 for axis in axes)

    # ---- as a value

    def __repr__(self) -> str:
        return layout_input.format_layout(
            self.mesh, self.shape, self.shard_order, self.partial, self.cuts
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: a Layout cannot be changed; make another")

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.mesh, self.shape, self.shard_order, dict(self.partial), self.cuts)

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self

    # ---- inside

    def _place(self, coordinate: Sequence[int] | None) -> tuple[int, ...]:
        if coordinate is None:
            place = self.mesh.get_coordinate()
            if place is None:
                raise LayoutError(f"coordinate: rank {self.mesh.get_rank()} is not in {self.mesh}")
            return place
        if not self.mesh.has(coordinate):
            raise LayoutError(
                f"coordinate: expected one within {self.mesh.shape}, got {format_value(coordinate)}"
            )
        return tuple(map(int, coordinate))


def _format_axes(mesh: DeviceMesh, axes: Sequence[int]) -> str:
    return f"({', '.join(map(mesh.axis_name, axes))})"


def _as_pending(partial: Iterable[tuple[int, ReduceOp]]) -> tuple[tuple[int, str], ...]:
    return tuple(sorted((axis, as_reduce_op(op, "partial")) for axis, op in partial))


def _intern(
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    order: tuple[tuple[int, ...], ...],
    partial: tuple[tuple[int, str], ...],
    cuts: tuple[Cut | None, ...] | None = None,
) -> Layout:
    """Return the interned layout with these properties."""
    cuts = _whole_cuts(len(shape)) if cuts is None else _canonical(mesh, shape, order, cuts)
    key = (mesh, shape, order, partial, cuts)
    with _interning:
        found = _interned.get(key)
        if found is None:
            placements = _placements(mesh, order, partial, cuts)
            is_cut = any(cut is not None for cut in cuts)
            values = (*key, placements, torch.Size(shape), math.prod(shape), is_cut)
            found = object.__new__(Layout)
            for field, value in zip(_FIELDS, values, strict=True):
                object.__setattr__(found, field, value)
            _interned[key] = found
    return found


@lru_cache(maxsize=64)
def _whole_cuts(ndim: int) -> tuple[None, ...]:
    return (None,) * ndim


def _canonical_order(
    mesh: DeviceMesh, order: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    """Give axes of size 1 their place in the order: no shard depends on it, but placements do."""
    if 1 not in mesh.shape or all(len(axes) < 2 for axes in order):
        return order
    sizes = mesh.shape
    return tuple(
        tuple(order_by_factors(split_factors(axes, sizes), sizes) or axes)
        if len(set(axes)) == len(axes)  # an axis that is used twice is refused later
        else axes
        for axes in order
    )


def _canonical(
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    order: tuple[tuple[int, ...], ...],
    cuts: tuple[Cut | None, ...],
) -> tuple[Cut | None, ...]:
    """Replace cuts that do not change any boundary by None."""
    return tuple(
        cuts_of.canonical_cut(size, tuple(mesh.shape[axis] for axis in axes), cut)
        for size, axes, cut in zip(shape, order, cuts, strict=True)
    )


def _placements(
    mesh: DeviceMesh,
    order: tuple[tuple[int, ...], ...],
    partial: tuple[tuple[int, str], ...],
    cuts: tuple[Cut | None, ...],
) -> tuple[Placement, ...]:
    result: list[Placement | None] = [None] * mesh.ndim
    uses: list[tuple[int, Placement]] = []
    for dim, (axes, cut) in enumerate(zip(order, cuts, strict=True)):
        factors = split_factors(axes, mesh.shape)
        uses += [(axis, shard_of_cut(dim, cut, factors[axis])) for axis in axes]
    uses += [(axis, Partial(op)) for axis, op in partial]
    for axis, placement in uses:
        if result[axis] is not None:
            raise LayoutError(
                f"axis {mesh.axis_name(axis)}: expected one use, "
                f"got both {result[axis]} and {placement}"
            )
        result[axis] = placement
    return tuple(placement or Replicate() for placement in result)
