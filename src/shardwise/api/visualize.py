"""`visualize_sharding`: print which rank holds which part of a tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from shardwise.core.errors import LayoutError
from shardwise.core.layout import Layout
from shardwise.dtensor.tensor import DTensor

Range = tuple[int, int]


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Print a table of the ranks that hold each part of a tensor.

    It is printed once, on the rank at coordinate 0 of each axis; nothing is communicated. Rows and
    columns are the last two dims; tensors of more dims have a table for each part of the others.
    Ranks that hold a pending contribution are in brackets; empty shards are listed below.

    Arguments:
        dtensor: a tensor of any number of dims.
        header: a line to print above.
        use_rich: accepted because torch does; the table is plain text.

    Example:
        >>> visualize_sharding(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)]))
                   Col 0-1    Col 2-3
        -------  ---------  ---------
        Row 0-1      cpu:0      cpu:1
        Row 2-3      cpu:2      cpu:3
    """
    if not isinstance(dtensor, DTensor):
        raise LayoutError(f"dtensor: expected a DTensor, got {type(dtensor).__name__}")
    place = dtensor._layout.mesh.get_coordinate()
    if place is not None and not any(place):
        print(sharding_tables(dtensor._layout, header))


def sharding_tables(layout: Layout, header: str = "") -> str:
    """Return the text that `visualize_sharding` prints for a layout."""
    lines = [header] if header else []
    holders, empty = _holders(layout)
    ndim = max(layout.ndim, 2)
    outer = [sorted({box[dim] for box in holders}) for dim in range(ndim - 2)]
    for part in itertools.product(*outer):
        if part:
            at = ", ".join(f"{start}-{stop}" for start, stop in part)
            lines += ["", f"[{at}]"]
        lines += _table({box[-2:]: ranks for box, ranks in holders.items() if box[:-2] == part})
    if empty:
        lines.append(f"without elements: {_named(layout, empty)}")
    return "\n".join(lines)


def _holders(layout: Layout) -> tuple[dict[tuple[Range, ...], str], list[int]]:
    """Return the ranks that hold each part, with first and last index of each dim; and the ranks
    that hold nothing."""
    mesh = layout.mesh
    found: dict[tuple[Range, ...], list[int]] = {}
    empty = []
    for place in itertools.product(*map(range, mesh.shape)):
        rank = mesh.rank_at(place)
        for part in _parts(layout, place):
            found.setdefault(part, []).append(rank)
        if 0 in layout.local_shape(place):
            empty.append(rank)
    return {part: _named(layout, ranks) for part, ranks in found.items()}, empty


def _parts(layout: Layout, place: Sequence[int]) -> Iterator[tuple[Range, ...]]:
    """Yield the parts of the tensor that a rank holds: one, or several where a dim is cut."""
    for box, _ in layout.boxes(place):
        if box.is_empty:
            continue
        ranges = [(start, stop - 1) for start, stop in zip(*box, strict=True)]
        while len(ranges) < 2:  # as a column
            ranges.append((0, 0))
        yield tuple(ranges)


def _named(layout: Layout, ranks: Sequence[int]) -> str:
    text = ",".join(map(str, ranks))
    return f"{layout.mesh.device_type}:" + (f"({text})" if layout.partial else text)


def _table(parts: dict[tuple[Range, ...], str]) -> list[str]:
    """Return the lines of the table of one part of the outer dims."""
    rows, columns = (sorted({part[at] for part in parts}) for at in (0, 1))
    cells = [["", *(f"Col {first}-{last}" for first, last in columns)]]
    for row in rows:
        name = f"Row {row[0]}-{row[1]}"
        cells.append([name, *(parts.get((row, column), "") for column in columns)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            [line[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        ).rstrip()
        for line in cells
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
