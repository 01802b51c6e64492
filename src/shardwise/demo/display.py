"""The output of the demo: progress, loss curves, a table of collectives, a table of shards."""

from __future__ import annotations

import importlib
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from shardwise import Cause, Event
from shardwise.core.box import Box
from shardwise.demo.options import Options
from shardwise.demo.training import Outcome

_POLL_SECONDS = 0.1
"""How often to look for new losses of the ranks."""
_LINES = 10
"""How many lines of progress to print where there is no terminal."""
_SHOWN_STEPS = 12
"""How many steps the table of losses has."""
_BAR = 20


class RunProgress:
    """The progress of one run: a bar on a terminal, lines elsewhere."""

    def __init__(self, console: Console, bars: Progress | None, title: str, options: Options):
        self._console, self._bars, self._title = console, bars, title
        self._steps, self._tokens = options.steps, options.size.tokens
        self._done = 0
        self._started = time.perf_counter()
        if bars is not None:
            self._bar = bars.add_task(title, total=options.steps, loss="", rate="")

    def step(self, loss: float) -> None:
        """Show that a step is done."""
        if not self._done:  # the first step plans, so the rate is that of the steps after it
            self._started = time.perf_counter()
        self._done += 1
        seconds = time.perf_counter() - self._started
        rate = f"{(self._done - 1) * self._tokens / seconds:,.0f}" if self._done > 1 else "-"
        if self._bars is not None:
            self._bars.update(
                self._bar, advance=1, loss=f"loss {loss:.4f}", rate=f"{rate} tokens/s"
            )
        elif self._done * _LINES // self._steps > (self._done - 1) * _LINES // self._steps:
            self._console.print(
                f"{self._title}: step {self._done} of {self._steps}, loss {loss:.4f}, "
                f"{rate} tokens/s",
                highlight=False,
            )


@contextmanager
def progress_bars(console: Console) -> Iterator[Progress | None]:
    """Draw progress bars, if there is a terminal; yield None otherwise."""
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[rate]}"),
    )
    with Progress(*columns, console=console) as progress:
        yield progress


@contextmanager
def follow_losses(progress: Path, run: RunProgress) -> Iterator[None]:
    """Show the steps of another process, which writes each loss to a line of a file."""
    ended = threading.Event()

    def follow() -> None:
        progress.touch()
        rest = ""
        with progress.open() as lines:
            while True:
                is_last = ended.is_set()
                *whole, rest = (rest + lines.read()).split("\n")
                for line in whole:
                    run.step(float(line))
                if is_last:
                    return
                ended.wait(_POLL_SECONDS)

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


def loss_table(on_mesh: Sequence[float], alone: Sequence[float], label: str) -> Table:
    """Return a table of both loss curves, at some of the steps."""
    table = Table(title="The loss curves")
    for name in ("step", label, "one process", "difference"):
        table.add_column(name, justify="right")
    table.add_column("")
    largest = max(*on_mesh, *alone)
    count = len(on_mesh)
    for step in sorted(
        {round(at * (count - 1) / (_SHOWN_STEPS - 1)) for at in range(_SHOWN_STEPS)}
    ):
        mine, theirs = on_mesh[step], alone[step]
        bar = "█" * round(_BAR * mine / largest) if largest > 0 else ""
        table.add_row(
            str(step + 1), f"{mine:.6f}", f"{theirs:.6f}", f"{abs(mine - theirs):.1e}", bar
        )
    return table


def save_plot(path: Path, on_mesh: Sequence[float], alone: Sequence[float], label: str) -> bool:
    """Draw both loss curves; return False if matplotlib is not installed."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        return False
    figure = figures.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(alone) + 1), alone, color="tab:orange", linewidth=5, alpha=0.5)
    axes.plot(range(1, len(on_mesh) + 1), on_mesh, color="tab:blue", linewidth=1.2)
    axes.legend(["one process", label])
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="The same training twice")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    return True


_SPLIT_DIM = {
    "tok_embeddings": "vocabulary",
    "output": "vocabulary",
    "attention": "heads",
    "feed_forward": "hidden features",
}
"""What tensor parallelism splits in each part of the model."""

_DATA_PARALLEL = {
    ("unshard", "all_gather"): "parameters, put together",
    ("reduce_gradients", "reduce_scatter"): "gradients, mean over the batch, a piece each",
    ("reduce_gradients", "all_reduce"): "gradients, mean over the replicas' parts of the batch",
}
"""The purposes of the collectives of `fully_shard`."""


@dataclass
class CollectiveRow:
    """Collectives of one kind, for one reason."""

    direction: str
    kind: str
    axes: tuple[str, ...]
    reason: str
    count: int = 0
    bytes: int = 0
    modules: dict[str, None] = field(default_factory=dict)
    """The modules that caused them, in order; a dict serves as an ordered set."""

    @property
    def why(self) -> str:
        """The modules and the reason, such as `layers.*.attention: sum over the heads`."""
        by_parent: dict[str, list[str]] = {}
        for module in self.modules:
            parent, _, name = module.rpartition(".")
            by_parent.setdefault(f"{parent}." if parent else "", []).append(name)
        places = [
            parent + (f"{{{','.join(sorted(names))}}}" if len(names) > 1 else names[0])
            for parent, names in by_parent.items()
        ]
        return f"{', '.join(places)}: {self.reason}"


def collective_rows(events: Iterable[Event]) -> list[CollectiveRow]:
    """Group events of the same direction, kind, axes, reason and part of the model into rows."""
    found: dict[object, CollectiveRow] = {}
    for event in events:
        if len(event.ranks) == 1:
            continue  # an axis of one rank
        cause = event.cause
        module = re.sub(r"\.\d+\.", ".*.", cause.module)
        reason = _reason(cause, event.kind, event.axes)
        kind = event.kind.replace("_", "-")
        key = cause.direction, kind, event.axes, reason, _part(module)
        row = found.setdefault(key, CollectiveRow(cause.direction, kind, event.axes, reason))
        row.count += 1
        row.bytes += event.bytes
        for each in module.split(", "):  # one collective may serve several modules
            row.modules[each or cause.operator] = None
    return sorted(found.values(), key=lambda row: row.direction == "backward")


def _part(module: str) -> str | None:
    """Return the part of the model that a module belongs to."""
    return next((part for part in module.split(".") if part in _SPLIT_DIM), None)


def _reason(cause: Cause, kind: str, axes: tuple[str, ...]) -> str:
    split = _SPLIT_DIM.get(_part(cause.module) or "")
    if (cause.operator, kind) in _DATA_PARALLEL:
        return _DATA_PARALLEL[cause.operator, kind]
    if cause.operator == "item":
        return "the loss, to be shown"
    if cause.operator == "cross_entropy":
        if "dp" in axes:
            return "the mean is over all tokens of the batch"
        return "softmax over the split vocabulary"
    if cause.direction == "backward" and ("dp" in axes or cause.operator == "rms_norm"):
        over = [name for axis, name in (("dp", "batch"), ("tp", "sequence")) if axis in axes]
        return f"weights' gradients, sum over the {' and the '.join(over)}"
    if cause.direction == "forward" and kind in ("all_reduce", "reduce_scatter") and split:
        parts = ", a part of the sequence each" if kind == "reduce_scatter" else ""
        return f"sum over the {split}{parts}"
    if cause.direction == "forward" and kind == "all_gather":
        return "the sequence, put together"
    if cause.direction == "backward" and kind in ("all_reduce", "reduce_scatter") and split:
        return f"gradient of what came in, sum over the {split}"
    if cause.direction == "backward" and kind == "all_gather":
        return "gradient of what went out, put together"
    return f"for {cause.operator or 'itself'}"


def communication_table(events: Iterable[Event]) -> Table:
    """Return a table of the collectives of one step, with their reasons."""
    table = Table(title="What one step communicates, as rank 0 sees it")
    table.add_column("collective")
    table.add_column("axes")
    table.add_column("times", justify="right")
    table.add_column("received", justify="right")
    table.add_column("where: why", overflow="fold")
    found = collective_rows(events)
    for direction in ("forward", "backward"):
        table.add_row(f"[bold]{direction}[/]")
        for row in found:
            if row.direction == direction:
                table.add_row(*_totals(row.kind, ".".join(row.axes), [row]), row.why)
        table.add_section()
    for kind in sorted({row.kind for row in found}):
        table.add_row(*_totals(kind, "", [row for row in found if row.kind == kind]))
    table.add_row(*_totals("[bold]in all[/]", "", found))
    return table


def _totals(kind: str, axes: str, added: list[CollectiveRow]) -> tuple[str, ...]:
    count, received = sum(row.count for row in added), sum(row.bytes for row in added)
    return kind, axes, str(count), format_bytes(received)


def format_bytes(count: int) -> str:
    """Format a number of bytes, such as `1.5 MB`."""
    for unit, size in (("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


_ROWS, _COLUMNS = 4, 8
_HALVES = {(False, False): "·", (True, False): "▀", (False, True): "▄", (True, True): "█"}
_COLOURS = ("cyan", "green", "yellow", "magenta")


def shard_table(outcomes: Sequence[Outcome]) -> Table:
    """Return a table of the shards of one layer: a row for each weight, and a column for each
    position along the mesh axes that split parameters. Ranks at one position hold equal shards."""
    positions: dict[str, list[int]] = {}
    for rank, each in enumerate(outcomes):
        where = ", ".join(f"{axis}={at}" for axis, at in each.position.items())
        positions.setdefault(where, []).append(rank)
    table = Table(title="Shards of the first layer, by rank", show_lines=True)
    table.add_column("weight")
    for where, ranks in positions.items():
        which = ", ".join(map(str, ranks))
        table.add_column(f"{where}: rank{'s' if len(ranks) > 1 else ''} {which}")
    for name, (shape, _) in outcomes[0].pieces.items():
        cells = []
        for column, ranks in enumerate(positions.values()):
            box = outcomes[ranks[0]].pieces[name][1]
            colour = _COLOURS[column % len(_COLOURS)]
            cells.append(Text(f"{format_box(shape, box)}\n{draw_box(shape, box)}", colour))
        size = " x ".join(map(str, shape))
        table.add_row(f"{name.removeprefix('layers.0.').removesuffix('.weight')}\n{size}", *cells)
    return table


def format_box(shape: Sequence[int], box: Box) -> str:
    """Format a box of a tensor, such as `rows 0:64`; `all` for the whole tensor, `nothing` if the
    box is empty."""
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


def draw_box(shape: Sequence[int], box: Box) -> str:
    """Draw a box within a tensor with blocks; a vector is one row."""
    if len(shape) == 1:
        return "".join("▀" if each else "·" for each in _covered_cells(shape[0], box, 0, _COLUMNS))
    down, across = (
        _covered_cells(shape[0], box, 0, _ROWS),
        _covered_cells(shape[1], box, 1, _COLUMNS),
    )
    return "\n".join(
        "".join(_HALVES[down[row] and column, down[row + 1] and column] for column in across)
        for row in range(0, _ROWS, 2)
    )


def _covered_cells(size: int, box: Box, dim: int, cells: int) -> list[bool]:
    """Return which of the cells along a dim have their middle within the box."""
    middles = [(cell + 0.5) * size / cells for cell in range(cells)]
    return [box.start[dim] <= middle < box.stop[dim] for middle in middles]
