"""The arguments and the text form of layouts.

Each `as_...` function returns the canonical form of an argument, or raises an error that names it.
`format_layout` writes a layout such as `[8@dp, (24/8+12/4)@tp] +sum@pp`; `parse_layout` reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from shardwise.core import cut as cuts_of
from shardwise.core.checks import as_int, as_ints
from shardwise.core.cut import Cut
from shardwise.core.errors import LayoutError
from shardwise.core.mesh import Axis, DeviceMesh
from shardwise.core.placement import Shard, _StridedShard, order_by_factors


def as_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a global shape as plain ints."""
    sizes = as_ints(shape)
    if sizes is None or min(sizes, default=0) < 0:
        raise LayoutError(f"shape: expected sizes of at least 0, got {shape!r}")
    return sizes


def as_dim(dim: int, ndim: int, argument: str) -> int:
    """Return a dim as a position from the front; negative dims count from the end."""
    position = as_int(dim)
    if position is None or not -ndim <= position < ndim:
        raise LayoutError(f"{argument}: expected a dim of a {ndim}-d tensor, got {dim!r}")
    return position % ndim


def as_order(
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    order: Sequence[Sequence[Axis]] | Mapping[int, Sequence[Axis]],
) -> tuple[tuple[int, ...], ...]:
    """Return the canonical shard order: one tuple of axis positions per dim."""
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
    """Return one cut or None per dim; each cut has whole units and the length of the dim."""
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


# ---- placements that split one dim, by axis


def placed_order(mesh: DeviceMesh, dim: int, shards: Mapping[int, Shard]) -> tuple[int, ...]:
    """Return the axes that split a dim, outer to inner, as their placements say."""
    if len(shards) == 1:
        return tuple(shards)
    factors = {axis: _split_factor(shard) for axis, shard in shards.items()}
    order = order_by_factors(factors, mesh.shape)
    if order is None:
        sizes = ", ".join(f"{mesh.axis_name(axis)}={mesh.shape[axis]}" for axis in shards)
        raise LayoutError(
            f"placements: expected split factors that are products of the sizes of later axes of "
            f"dim {dim}, outermost first ({sizes}); got {dict(shards)}. To give the order of axes, "
            "use Shard(dim) and shard_order=; for a dim made of pieces, Shard(dim, pieces=n)"
        )
    return tuple(order)


def placed_cut(size: int, dim: int, shards: Mapping[int, Shard]) -> Cut | None:
    """Return the pieces of a dim, as the placements of the axes that split it say."""
    found: Cut | None = None
    for axis, shard in shards.items():
        where = f"placements[{axis}] = {shard}"
        cut = shard.cut(size, where)
        if len(shards) == 1 and _split_factor(shard) > 1:  # torch's way to say pieces
            if cut is not None:
                raise LayoutError(
                    f"{where}: expected pieces or a split factor, as no other axis splits dim "
                    f"{dim}; got both"
                )
            return _even_cut(size, _split_factor(shard))
        if cut is not None and found is not None and cut != found:
            raise LayoutError(
                f"{where}: expected the pieces of dim {dim} that another axis has, "
                f"{cuts_of.format_cut(found)}; got {cuts_of.format_cut(cut)}"
            )
        found = found if cut is None else cut
    return found


def _even_cut(size: int, count: int) -> Cut | None:
    """Return the pieces that `torch.chunk` makes of a dim."""
    if not size:
        return None
    length = -(-size // count)
    rest = size % length
    return ((length, 1),) * (size // length) + (((rest, 1),) if rest else ())


def _split_factor(shard: Shard) -> int:
    return shard.split_factor if isinstance(shard, _StridedShard) else 1


# ---- layouts as text

# A dtype may stand in front, as in the repr of a tensor: `f32[8@dp, 4]`.
_LAYOUT = re.compile(
    r"\w*\[(?P<dims>\s*((\d+|\(\d+(/\d+)?(\+\d+(/\d+)?)*\))(@\w+(\.\w+)*)?(\s*,\s*|\s*(?=\])))*)\]"
    r"(?P<partial>(\s*\+\w+@\w+(\.\w+)*)*)"
)
_PENDING = re.compile(r"\+(\w+)@([\w.]+)")


class ParsedLayout(NamedTuple):
    """The arguments of `Layout` that a text stands for."""

    shape: list[int]
    shard_order: list[list[Axis]]
    partial: dict[Axis, str]
    cuts: dict[int, Cut | None]


def parse_layout(text: str, mesh: DeviceMesh) -> ParsedLayout:
    """Parse the text that `format_layout` returns."""
    match = _LAYOUT.fullmatch(text.strip())
    if match is None:
        raise LayoutError(f"text: expected such as '[8@dp, 4096@tp.ep] +sum@pp', got {text!r}")
    found = ParsedLayout([], [], {}, {})
    for entry in filter(None, re.split(r"\s*,\s*", match["dims"].strip())):
        size, _, axes = entry.partition("@")
        cut = cuts_of.parse_cut(size)
        if size.startswith("("):
            found.cuts[len(found.shape)] = cut
        found.shape.append(sum(length for length, _ in cut))
        found.shard_order.append([_axis(axis) for axis in axes.split(".") if axis])
    for op, axes in _PENDING.findall(match["partial"]):
        for axis in axes.split("."):
            position = mesh.axis(_axis(axis))
            if position in found.partial:
                raise LayoutError(f"text: axis {axis} is pending twice in {text!r}")
            found.partial[position] = op
    return found


def _axis(text: str) -> Axis:
    return int(text) if text.isdecimal() else text


def format_layout(
    mesh: DeviceMesh,
    shape: Sequence[int | str],
    shard_order: Sequence[Sequence[int]],
    partial: Sequence[tuple[int, str]],
    cuts: Sequence[Cut | None],
) -> str:
    """Return the text of a layout."""
    name = mesh.axis_name
    dims = [
        (str(size) if cut is None else cuts_of.format_cut(cut))
        + (f"@{'.'.join(map(name, axes))}" if axes else "")
        for size, axes, cut in zip(shape, shard_order, cuts, strict=True)
    ]
    pending: dict[str, list[str]] = {}
    for axis, op in partial:
        pending.setdefault(op, []).append(name(axis))
    return f"[{', '.join(dims)}]" + "".join(
        f" +{op}@{'.'.join(names)}" for op, names in pending.items()
    )


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "bool"}


def short_dtype(dtype: torch.dtype) -> str:
    """Return a short name of a dtype, such as `f32` or `i64`."""
    name = str(dtype).removeprefix("torch.")
    letters = name.rstrip("0123456789")
    return _SHORT[letters] + name[len(letters) :] if letters in _SHORT else name
