"""Layouts as text, such as `[8@dp, (24/8+12/4)@tp] +sum@pp`: written, and read again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardwise import cut as cuts_of
from shardwise.cut import Cut
from shardwise.errors import LayoutError
from shardwise.mesh import Axis, DeviceMesh

# A dtype may stand in front, as the repr of a tensor has it: `f32[8@dp, 4]`.
_LAYOUT = re.compile(
    r"\w*\[(?P<dims>\s*((\d+|\(\d+(/\d+)?(\+\d+(/\d+)?)*\))(@\w+(\.\w+)*)?(\s*,\s*|\s*(?=\])))*)\]"
    r"(?P<partial>(\s*\+\w+@\w+(\.\w+)*)*)"
)
_PENDING = re.compile(r"\+(\w+)@([\w.]+)")


class Parsed(NamedTuple):
    """What a text says of a layout."""

    shape: list[int]
    shard_order: list[list[Axis]]
    partial: dict[Axis, str]
    cuts: dict[int, Cut | None]


def parsed(text: str, mesh: DeviceMesh) -> Parsed:
    """What `shown` gave."""
    match = _LAYOUT.fullmatch(text.strip())
    if match is None:
        raise LayoutError(f"text: expected such as '[8@dp, 4096@tp.ep] +sum@pp', got {text!r}")
    found = Parsed([], [], {}, {})
    for entry in filter(None, re.split(r"\s*,\s*", match["dims"].strip())):
        size, _, axes = entry.partition("@")
        cut = cuts_of.parsed(size)
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


def shown(
    mesh: DeviceMesh,
    shape: Sequence[int | str],
    shard_order: Sequence[Sequence[int]],
    partial: Sequence[tuple[int, str]],
    cuts: Sequence[Cut | None],
) -> str:
    """The text of a layout."""
    name = mesh.axis_name
    dims = [
        (str(size) if cut is None else cuts_of.shown(cut))
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
    """Such as `f32` or `i64`."""
    name = str(dtype).removeprefix("torch.")
    letters = name.rstrip("0123456789")
    return _SHORT[letters] + name[len(letters) :] if letters in _SHORT else name
