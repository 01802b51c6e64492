"""The demo: four real processes place a tensor on a 2x2 mesh, add it up and put it together."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from shardwise.box import Box, chunk_sizes
from shardwise.comm import communicator
from shardwise.launch import launch
from shardwise.layout import Layout
from shardwise.mesh import init_device_mesh
from shardwise.placement import Shard

_MESH = (2, 2)
_NAMES = ("dp", "tp")
_SHAPE = (5, 6)  # five rows over two ranks: an uneven split is an ordinary case


@dataclass(frozen=True)
class Report:
    """What one rank held and computed."""

    coordinate: tuple[int, ...]
    process: int
    box: Box
    piece: torch.Tensor
    column_sums: torch.Tensor
    row_sums: torch.Tensor
    columns: torch.Tensor
    rows: torch.Tensor
    whole: torch.Tensor


def whole_tensor() -> torch.Tensor:
    """The global tensor of the demo."""
    return torch.arange(30, dtype=torch.float32).reshape(_SHAPE)


def on_each_rank() -> Report:
    """What every rank of the demo runs."""
    mesh = init_device_mesh("cpu", _MESH, _NAMES)
    layout = Layout.from_placements(mesh, _SHAPE, (Shard(0), Shard(1)))
    everybody, dp, tp = communicator(mesh), communicator(mesh, "dp"), communicator(mesh, "tp")
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "every rank is in the mesh"

    # Rank 0 has the tensor; everybody gets a piece.
    pieces = None
    if mesh.get_rank() == 0:
        places = [mesh.coordinate_of(rank) for rank in range(mesh.size())]
        pieces = [whole_tensor()[layout.box(place).slices].contiguous() for place in places]
    piece = everybody.scatter(torch.empty(layout.local_shape()), pieces, source=0)

    heights, widths = chunk_sizes(_SHAPE[0], dp.size), chunk_sizes(_SHAPE[1], tp.size)
    columns = dp.all_gather(piece, dim=0, sizes=heights)
    return Report(
        coordinate=coordinate,
        process=os.getpid(),
        box=layout.box(),
        piece=piece,
        column_sums=dp.all_reduce(piece.sum(dim=0)),
        row_sums=tp.all_reduce(piece.sum(dim=1)),
        columns=columns,
        rows=tp.all_gather(piece, dim=1, sizes=widths),
        whole=tp.all_gather(columns, dim=1, sizes=widths),
    )


def checks(reports: list[Report]) -> dict[str, bool]:
    """Each claim of the demo, and whether it is what one process computes."""
    whole = whole_tensor()
    down = [(report, report.box.slices[0]) for report in reports]
    across = [(report, report.box.slices[1]) for report in reports]

    def equal(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        return all(torch.equal(ours, reference) for ours, reference in pairs)

    return {
        "the pieces are slices of the tensor": equal(
            [(report.piece, whole[report.box.slices]) for report in reports]
        ),
        "summed over dp: the sums of the columns": equal(
            [(report.column_sums, whole.sum(dim=0)[columns]) for report, columns in across]
        ),
        "summed over tp: the sums of the rows": equal(
            [(report.row_sums, whole.sum(dim=1)[rows]) for report, rows in down]
        ),
        "gathered over dp: whole columns": equal(
            [(report.columns, whole[:, columns]) for report, columns in across]
        ),
        "gathered over tp: whole rows": equal(
            [(report.rows, whole[rows]) for report, rows in down]
        ),
        "gathered over dp and tp: the tensor": equal([(report.whole, whole) for report in reports]),
    }


def picture(reports: list[Report]) -> Table:
    """Who holds what: one cell per rank, laid out like the mesh."""
    table = Table(title=f"a {_SHAPE[0]} x {_SHAPE[1]} tensor on a 2 x 2 mesh", show_lines=True)
    table.add_column("")
    for place in range(_MESH[1]):
        table.add_column(f"tp={place}")
    for place in range(_MESH[0]):
        cells = [
            _cell(rank, each) for rank, each in enumerate(reports) if each.coordinate[0] == place
        ]
        table.add_row(f"dp={place}", *cells)
    return table


def _cell(rank: int, report: Report) -> str:
    (top, left), (bottom, right) = report.box
    colour = ("cyan", "green", "yellow", "magenta")[rank % 4]
    numbers = "\n".join(" ".join(f"{int(x):2d}" for x in row) for row in report.piece)
    where = f"rows {top}:{bottom}, columns {left}:{right}"
    return f"[bold]rank {rank}[/bold] (process {report.process})\n{where}\n[{colour}]{numbers}[/]"


def run(console: Console | None = None) -> bool:
    """Run the demo; True if everything was right."""
    console = console or Console()
    console.print("Starting four processes, joined by gloo over loopback ...")
    reports = launch(on_each_rank, 4)
    console.print(picture(reports))
    table = Table(title="against one process")
    table.add_column("result of the four ranks")
    table.add_column("is")
    outcome = checks(reports)
    for claim, holds in outcome.items():
        table.add_row(claim, "[green]equal[/]" if holds else "[red]WRONG[/]")
    console.print(table)
    right = all(outcome.values())
    console.print(
        "All of it is bit for bit what one process computes."
        if right
        else "[red]Some of it differs from what one process computes.[/]"
    )
    return right
