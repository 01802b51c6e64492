"""Checks of what users pass for layouts: each returns the canonical form, or refuses by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.checks import as_int, as_ints
from shardwise.cut import Cut
from shardwise.errors import LayoutError
from shardwise.mesh import Axis, DeviceMesh


def as_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """A global shape."""
    sizes = as_ints(shape)
    if sizes is None or min(sizes, default=0) < 0:
        raise LayoutError(f"shape: expected sizes of at least 0, got {shape!r}")
    return sizes


def as_dim(dim: int, ndim: int, argument: str) -> int:
    """A dim counted from the front."""
    position = as_int(dim)
    if position is None or not -ndim <= position < ndim:
        raise LayoutError(f"{argument}: expected a dim of a {ndim}-d tensor, got {dim!r}")
    return position % ndim


def as_order(
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
        position = as_dim(dim, len(shape), "shard_order")
        if position in result:
            raise LayoutError(f"shard_order: expected each dim once, got {list(order)}")
        result[position] = tuple(mesh.axis(axis) for axis in axes)
    return tuple(result.get(dim, ()) for dim in range(len(shape)))


def as_cuts(
    shape: tuple[int, ...], cuts: Sequence[Cut | None] | Mapping[int, Cut | None]
) -> tuple[Cut | None, ...]:
    """One cut, or None, per dim; of whole units, and as long as the dim."""
    if not isinstance(cuts, Mapping):
        if len(cuts) != len(shape):
            raise LayoutError(f"cuts: expected {len(shape)} entries, one per dim; got {cuts}")
        cuts = dict(enumerate(cuts))
    result: dict[int, Cut | None] = {}
    for dim, cut in cuts.items():
        position = as_dim(dim, len(shape), "cuts")
        if cut is None:
            continue
        good = all(len(each) == 2 and None not in map(as_int, each) for each in cut)
        if not good or any(unit < 1 or length < 0 or length % unit for length, unit in cut):
            raise LayoutError(
                f"cuts[{dim}]: expected pieces such as ((24, 8), (12, 4)), each a length and the "
                f"unit that divides it; got {cut!r}"
            )
        if sum(length for length, _ in cut) != shape[position]:
            raise LayoutError(
                f"cuts[{dim}]: expected lengths that add up to {shape[position]}, got {cut!r}"
            )
        result[position] = tuple((int(length), int(unit)) for length, unit in cut)
    return tuple(result.get(dim) for dim in range(len(shape)))
