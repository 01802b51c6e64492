"""Layout: how one global tensor lies on one mesh.

A layout is the mesh, the global shape, for every dim the *ordered* axes that split it (outer to
inner) and the axes whose contributions are still to be reduced. It is frozen and interned: equal
layouts are one object, so comparing and hashing cost nothing, and a layout can be the key of a
cache. All its answers are arithmetic on one coordinate; none looks at another rank.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from shardwise.box import Box, chunk
from shardwise.checks import as_int, as_ints
from shardwise.errors import LayoutError
from shardwise.mesh import Axis, DeviceMesh, as_mesh
from shardwise.placement import Partial, Placement, Replicate, Shard, as_placement

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

_interned: WeakValueDictionary[tuple[Any, ...], Layout] = WeakValueDictionary()
_interning = threading.Lock()
_FIELDS = ("mesh", "shape", "shard_order", "partial", "placements", "size", "numel")


class Layout:
    """How one global tensor lies on one mesh.

    Arguments:
        mesh: the ranks it lies on.
        shape: the global shape.
        shard_order: for each dim, the axes that split it, outer to inner. May be a mapping that
            names only the dims that are split.
        partial: the reduction that is pending, for each axis that has one.

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
    placements: tuple[Placement, ...]
    """The same seen per axis, as torch does. It does not tell the order of nested shards."""
    size: torch.Size
    """The global shape, as torch's own type."""
    numel: int
    """The number of elements of the global tensor."""

    def __new__(
        cls,
        mesh: DeviceMesh | TorchMesh,
        shape: Sequence[int],
        shard_order: Sequence[Sequence[Axis]] | Mapping[int, Sequence[Axis]] = (),
        partial: Mapping[Axis, str] | None = None,
    ) -> Layout:
        mesh, shape = as_mesh(mesh), _as_shape(shape)
        order = _as_order(mesh, shape, shard_order)
        if partial is not None and not isinstance(partial, Mapping):
            raise LayoutError(f"partial: expected such as {{'pp': 'sum'}}, got {partial!r}")
        pending = tuple(sorted((mesh.axis(axis), op) for axis, op in (partial or {}).items()))
        return _intern(mesh, shape, order, pending)

    @staticmethod
    def from_placements(
        mesh: DeviceMesh | TorchMesh,
        shape: Sequence[int],
        placements: Sequence[Placement],
        shard_order: Sequence[Sequence[Axis]] | Mapping[int, Sequence[Axis]] | None = None,
    ) -> Layout:
        """The layout with these placements, one per axis of the mesh.

        Arguments:
            placements: ours or torch's own.
            shard_order: for each dim that several axes split, those axes outer to inner.
                By default in the order of the mesh, as torch has it.
        """
        mesh, shape = as_mesh(mesh), _as_shape(shape)
        if not isinstance(placements, Sequence) or len(placements) != mesh.ndim:
            raise LayoutError(
                f"placements: expected {mesh.ndim}, one per axis of {mesh!r}; got {placements!r}"
            )
        placements = [as_placement(each, f"placements[{i}]") for i, each in enumerate(placements)]
        split: dict[int, list[int]] = {}
        partial: dict[Axis, str] = {}
        for axis, placement in enumerate(placements):
            match placement:
                case Shard(dim):
                    dim = _as_dim(dim, len(shape), f"placements[{axis}] = {placement}")
                    split.setdefault(dim, []).append(axis)
                case Partial(reduce_op):
                    partial[axis] = reduce_op
        if shard_order is None:
            return Layout(mesh, shape, split, partial)
        ordered = _as_order(mesh, shape, shard_order)
        for dim, axes in enumerate(ordered):
            wanted = split.get(dim, [])
            if axes and sorted(axes) != wanted:
                raise LayoutError(
                    f"shard_order[{dim}]: expected the axes that placements {tuple(placements)} "
                    f"split dim {dim} over, {_shown(mesh, wanted)}; got {_shown(mesh, axes)}"
                )
            split[dim] = list(axes or wanted)
        return Layout(mesh, shape, split, partial)

    @staticmethod
    def parse(text: str, mesh: DeviceMesh | TorchMesh) -> Layout:
        """The layout that `repr` shows as `text`: `Layout.parse(repr(x), x.mesh) is x`.

        Example:
            >>> mesh = DeviceMesh.abstract((2, 2, 2), ("dp", "tp", "pp"))
            >>> Layout.parse("[8@dp.tp, 128] +sum@pp", mesh).local_shape((0, 1, 0))
            (2, 128)
        """
        mesh = as_mesh(mesh)
        match = _LAYOUT.fullmatch(text.strip())
        if match is None:
            raise LayoutError(f"text: expected such as '[8@dp, 4096@tp.ep] +sum@pp', got {text!r}")
        shape, split = [], []
        for entry in filter(None, re.split(r"\s*,\s*", match["dims"].strip())):
            size, _, axes = entry.partition("@")
            shape.append(int(size))
            split.append([_parse_axis(axis) for axis in axes.split(".") if axis])
        partial: dict[Axis, str] = {}
        for op, axes in _PENDING.findall(match["partial"]):
            for axis in axes.split("."):
                if mesh.axis(_parse_axis(axis)) in partial:
                    raise LayoutError(f"text: axis {axis} is pending twice in {text!r}")
                partial[mesh.axis(_parse_axis(axis))] = op
        return Layout(mesh, shape, split, partial)

    def relaid(
        self,
        shard_order: Iterable[Iterable[int]] | None = None,
        partial: Mapping[int, str] | None = None,
    ) -> Layout:
        """The same tensor on the same mesh, laid out otherwise. Axes are positions.

        Arguments:
            shard_order: for each dim the axes that split it; by default as it is.
            partial: the reductions that are pending; by default as they are.
        """
        order = self.shard_order if shard_order is None else tuple(map(tuple, shard_order))
        pending = self.partial if partial is None else tuple(sorted(partial.items()))
        return _intern(self.mesh, self.shape, order, pending)

    # ---- what a rank holds

    def box(self, coordinate: Sequence[int] | None = None) -> Box:
        """The indices of the global tensor held at `coordinate` (default: this rank)."""
        place = self._place(coordinate)
        start, stop = [], []
        for size, axes in zip(self.shape, self.shard_order, strict=True):
            first, end = 0, size
            for axis in axes:
                first, end = chunk(first, end, self.mesh.shape[axis], place[axis])
            start.append(first)
            stop.append(end)
        return Box(tuple(start), tuple(stop))

    def local_shape(self, coordinate: Sequence[int] | None = None) -> tuple[int, ...]:
        """The shape of the piece held at `coordinate` (default: this rank)."""
        return self.box(coordinate).shape

    @property
    def ndim(self) -> int:
        """The number of dims of the tensor."""
        return len(self.shape)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return not self.partial and not any(self.shard_order)

    # ---- as a value

    def __repr__(self) -> str:
        name = self.mesh.axis_name
        dims = [
            f"{size}@{'.'.join(map(name, axes))}" if axes else str(size)
            for size, axes in zip(self.shape, self.shard_order, strict=True)
        ]
        pending: dict[str, list[str]] = {}
        for axis, op in self.partial:
            pending.setdefault(op, []).append(name(axis))
        return f"[{', '.join(dims)}]" + "".join(
            f" +{op}@{'.'.join(names)}" for op, names in pending.items()
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: a Layout cannot be changed; make another")

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.mesh, self.shape, self.shard_order, dict(self.partial))

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
                f"coordinate: expected one within {self.mesh.shape}, got {coordinate!r}"
            )
        return tuple(map(int, coordinate))


# A dtype may stand in front, as the repr of a tensor has it: `f32[8@dp, 4]`.
_LAYOUT = re.compile(
    r"\w*\[(?P<dims>\s*(\d+(@\w+(\.\w+)*)?(\s*,\s*|\s*(?=\])))*)\](?P<partial>(\s*\+\w+@\w+(\.\w+)*)*)"
)
_PENDING = re.compile(r"\+(\w+)@([\w.]+)")


def _parse_axis(text: str) -> Axis:
    return int(text) if text.isdecimal() else text


def _shown(mesh: DeviceMesh, axes: Sequence[int]) -> str:
    return f"({', '.join(map(mesh.axis_name, axes))})"


def _intern(
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    order: tuple[tuple[int, ...], ...],
    partial: tuple[tuple[int, str], ...],
) -> Layout:
    """The one layout with these properties."""
    key = (mesh, shape, order, partial)
    with _interning:
        found = _interned.get(key)
        if found is None:
            placements = _placements(mesh, order, partial)
            values = (*key, placements, torch.Size(shape), math.prod(shape))
            found = object.__new__(Layout)
            for field, value in zip(_FIELDS, values, strict=True):
                object.__setattr__(found, field, value)
            _interned[key] = found
    return found


def _placements(
    mesh: DeviceMesh, order: tuple[tuple[int, ...], ...], partial: tuple[tuple[int, str], ...]
) -> tuple[Placement, ...]:
    result: list[Placement | None] = [None] * mesh.ndim
    uses: list[tuple[int, Placement]]
    uses = [(axis, Shard(dim)) for dim, axes in enumerate(order) for axis in axes]
    uses += [(axis, Partial(op)) for axis, op in partial]
    for axis, placement in uses:
        if result[axis] is not None:
            raise LayoutError(
                f"axis {mesh.axis_name(axis)}: expected one use, "
                f"got both {result[axis]} and {placement}"
            )
        result[axis] = placement
    return tuple(placement or Replicate() for placement in result)


def _as_shape(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = as_ints(shape)
    if sizes is None or min(sizes, default=0) < 0:
        raise LayoutError(f"shape: expected sizes of at least 0, got {shape!r}")
    return sizes


def _as_dim(dim: int, ndim: int, argument: str) -> int:
    position = as_int(dim)
    if position is None or not -ndim <= position < ndim:
        raise LayoutError(f"{argument}: expected a dim of a {ndim}-d tensor, got {dim!r}")
    return position % ndim


def _as_order(
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    order: Sequence[Sequence[Axis]] | Mapping[int, Sequence[Axis]],
) -> tuple[tuple[int, ...], ...]:
    """The canonical shard order: one tuple of axis positions per dim."""
    if not isinstance(order, Mapping):
        if order and len(order) != len(shape):
            raise LayoutError(
                f"shard_order: expected {len(shape)} entries, one per dim; got {order}"
            )
        order = dict(enumerate(order))
    result: dict[int, tuple[int, ...]] = {}
    for dim, axes in order.items():
        if isinstance(axes, str | int):
            raise LayoutError(f"shard_order[{dim}]: expected a list of axes, got {axes!r}")
        position = _as_dim(dim, len(shape), "shard_order")
        if position in result:
            raise LayoutError(f"shard_order: expected each dim once, got {list(order)}")
        result[position] = tuple(mesh.axis(axis) for axis in axes)
    return tuple(result.get(dim, ()) for dim in range(len(shape)))
