"""The arguments and the text form of layouts.

Each `as_...` function returns the canonical form of an argument, or raises an error that names it.
`format_layout` writes a layout such as `[8@dp, (24/8+12/4)@tp] +sum@pp`; `parse_layout` reads it.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from shardwise.core import cut as cuts_of
from shardwise.core.checks import as_int, as_ints
from shardwise.core.cut import Cut
from shardwise.core.errors import LayoutError, also, format_value
from shardwise.core.mesh import Axis, DeviceMesh
from shardwise.core.placement import Shard, _StridedShard, order_by_factors


def as_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a global shape as plain ints."""
    sizes = as_ints(shape)
    if sizes is None or min(sizes, default=0) < 0 or math.prod(sizes) >= 2**63:
        raise LayoutError(
            f"shape: expected sizes of at least 0, for less than 2**63 elements; "
            f"got {format_value(shape)}"
        )
    return sizes


def as_dim(dim: int, ndim: int, argument: str) -> int:
    """Return a dim as a position from the front; negative dims count from the end."""
    position = as_int(dim)
    if position is None or not -ndim <= position < ndim:
        raise also(LayoutError, IndexError)(
            f"{argument}: expected a dim of a {ndim}-d tensor, got {format_value(dim)}"
        )
    return position % ndim


def as_order(
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    order: Sequence[Sequence[Axis]] | Mapping[int, Sequence[Axis]],
) -> tuple[tuple[int, ...], ...]:
    """Return the canonical shard order: one tuple of axis positions per dim."""
    if not isinstance(order, Mapping):
        if not isinstance(order, Sequence) or len(order) not in (0, len(shape)):
            raise LayoutError(
                f"shard_order: expected {len(shape)} entries, one per dim; "
                f"got {format_value(order)}"
            )
        order = dict(enumerate(order))
    result: dict[int, tuple[int, ...]] = {}
    for dim, axes in order.items():
        position = as_dim(dim, len(shape), "shard_order")
        if isinstance(axes, str) or not isinstance(axes, Sequence):
            raise LayoutError(
                f"shard_order[{dim}]: expected a list of axes, got {format_value(axes)}"
            )
        if position in result:
            raise LayoutError(f"shard_order: expected each dim once, got {list(order)}")
        result[position] = tuple(mesh.axis(axis) for axis in axes)
    return tuple(result.get(dim, ()) for dim in range(len(shape)))


def as_cuts(
    shape: tuple[int, ...], cuts: Sequence[Cut | None] | Mapping[int, Cut | None]
) -> tuple[Cut | None, ...]:
    """Return one cut or None per dim; each cut has whole units and the length of the dim."""
    if not isinstance(cuts, Mapping):
        if not isinstance(cuts, Sequence) or len(cuts) != len(shape):
            raise LayoutError(
                f"cuts: expected {len(shape)} entries, one per dim; got {format_value(cuts)}"
            )
        cuts = dict(enumerate(cuts))
    result: dict[int, Cut | None] = {}
    for dim, cut in cuts.items():
        position = as_dim(dim, len(shape), "cuts")
        if cut is None:
            continue
        pieces = list(map(as_ints, cut)) if isinstance(cut, Sequence) else [None]
        if not all(map(_is_piece, pieces)):
            raise LayoutError(
                f"cuts[{dim}]: expected pieces such as ((24, 8), (12, 4)), each a length and the "
                f"unit that divides it; got {format_value(cut)}"
            )
        if sum(length for length, _ in cut) != shape[position]:
            raise LayoutError(
                f"cuts[{dim}]: expected lengths that add up to {shape[position]}, "
                f"got {format_value(cut)}"
            )
        result[position] = tuple((int(length), int(unit)) for length, unit in cut)
    return tuple(result.get(dim) for dim in range(len(shape)))


def _is_piece(piece: tuple[int, ...] | None) -> bool:
    if piece is None or len(piece) != 2:
        return False
    length, unit = piece
    return unit >= 1 and length >= 0 and length % unit == 0


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

# An axis is its name or its position. A name that is no identifier, or is only digits, is quoted as
# Python quotes texts.
_AXIS = r"""(?:\w+|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_AXES = rf"{_AXIS}(?:\.{_AXIS})*"
_LENGTH = r"\d{1,19}"  # at most 64 bits
_PIECE = rf"{_LENGTH}(?:/{_LENGTH})?"
_DIM = rf"(?:{_LENGTH}|\({_PIECE}(?:\+{_PIECE})*\))(?:@{_AXES})?"
# A dtype may stand in front, as in the repr of a tensor: `f32[8@dp, 4]`.
_LAYOUT = re.compile(
    rf"\w*\[(?P<dims>\s*(?:{_DIM}(?:\s*,\s*|\s*(?=\])))*)\](?P<partial>(?:\s*\+\w+@{_AXES})*)"
)
_DIMS = re.compile(_DIM)
_PENDING = re.compile(rf"\+(\w+)@({_AXES})")
_AXIS_PATTERN = re.compile(_AXIS)


class ParsedLayout(NamedTuple):
    """The arguments of `Layout` that a text stands for."""

    shape: list[int]
    shard_order: list[list[Axis]]
    partial: dict[Axis, str]
    cuts: dict[int, Cut | None]


def parse_layout(text: str, mesh: DeviceMesh) -> ParsedLayout:
    """Parse the text that `format_layout` returns."""
    match = _LAYOUT.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise LayoutError(
            f"text: expected such as '[8@dp, 4096@tp.ep] +sum@pp', got {format_value(text)}"
        )
    found = ParsedLayout([], [], {}, {})
    for entry in _DIMS.findall(match["dims"]):
        size, _, axes = entry.partition("@")
        cut = cuts_of.parse_cut(size)
        if size.startswith("("):
            found.cuts[len(found.shape)] = cut
        found.shape.append(sum(length for length, _ in cut))
        found.shard_order.append(_parse_axes(axes))
    for op, axes in _PENDING.findall(match["partial"]):
        for axis in _parse_axes(axes):
            position = mesh.axis(axis)
            if position in found.partial:
                raise LayoutError(f"text: axis {axis} is pending twice in {text!r}")
            found.partial[position] = op
    return found


def _parse_axes(text: str) -> list[Axis]:
    return [_parse_axis(axis) for axis in _AXIS_PATTERN.findall(text)]


def _parse_axis(text: str) -> Axis:
    if text[0] in "'\"":
        try:
            name: str = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            raise LayoutError(
                f"text: expected an axis in quotes as Python has it, got {text}"
            ) from None
        return name
    return int(text) if text.isdecimal() and len(text) < 19 else text


def format_axis(mesh: DeviceMesh, axis: int) -> str:
    """Return the text of an axis in a layout."""
    name = mesh.axis_name(axis)
    is_bare = mesh.mesh_dim_names is None or (name.isascii() and name.isidentifier())
    return name if is_bare else repr(name)


def format_layout(
    mesh: DeviceMesh,
    shape: Sequence[int | str],
    shard_order: Sequence[Sequence[int]],
    partial: Sequence[tuple[int, str]],
    cuts: Sequence[Cut | None],
) -> str:
    """Return the text of a layout."""
    name = functools.partial(format_axis, mesh)
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
