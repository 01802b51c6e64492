"""The sharding of one layer: which rank holds which rows and columns of each weight."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from shardwise.box import Box
from shardwise.demo.training import Outcome

_ROWS, _COLUMNS = 4, 8
_HALVES = {(False, False): "·", (True, False): "▀", (False, True): "▄", (True, True): "█"}
_COLOURS = ("cyan", "green", "yellow", "magenta")


def picture(outcomes: Sequence[Outcome]) -> Table:
    """A column for each position along the axes that split parameters: the ranks there hold the
    same."""
    positions: dict[str, list[int]] = {}
    for rank, each in enumerate(outcomes):
        where = ", ".join(f"{axis}={at}" for axis, at in each.position.items())
        positions.setdefault(where, []).append(rank)
    shown = Table(title="Who holds what of the first layer", show_lines=True)
    shown.add_column("weight")
    for where, ranks in positions.items():
        which = ", ".join(map(str, ranks))
        shown.add_column(f"{where}: rank{'s' if len(ranks) > 1 else ''} {which}")
    for name, (shape, _) in outcomes[0].pieces.items():
        cells = []
        for column, ranks in enumerate(positions.values()):
            box = outcomes[ranks[0]].pieces[name][1]
            colour = _COLOURS[column % len(_COLOURS)]
            cells.append(Text(f"{part(shape, box)}\n{drawing(shape, box)}", colour))
        size = " x ".join(map(str, shape))
        shown.add_row(f"{name.removeprefix('layers.0.').removesuffix('.weight')}\n{size}", *cells)
    return shown


def part(shape: Sequence[int], box: Box) -> str:
    """Such as `rows 0:64`, or `all`."""
    if box.is_empty:
        return "nothing"
    found = [
        f"{name} {start}:{stop}"
        for name, size, start, stop in zip(
            ("rows", "columns"), shape, box.start, box.stop, strict=False
        )
        if (start, stop) != (0, size)
    ]
    return ", ".join(found) or "all"


def drawing(shape: Sequence[int], box: Box) -> str:
    """The box within the tensor, as blocks; a vector is one row."""
    if len(shape) == 1:
        return "".join("▀" if each else "·" for each in _line(shape[0], box, 0, _COLUMNS))
    down, across = _line(shape[0], box, 0, _ROWS), _line(shape[1], box, 1, _COLUMNS)
    return "\n".join(
        "".join(_HALVES[down[row] and column, down[row + 1] and column] for column in across)
        for row in range(0, _ROWS, 2)
    )


def _line(size: int, box: Box, dim: int, cells: int) -> list[bool]:
    """Which cells of a line have their middle within the box."""
    middles = [(cell + 0.5) * size / cells for cell in range(cells)]
    return [box.start[dim] <= middle < box.stop[dim] for middle in middles]
