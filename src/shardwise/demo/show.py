"""What is seen while the demo runs: bars on a terminal, lines elsewhere; and the loss curves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from shardwise.demo.options import Options

_LOOK_SECONDS = 0.1
_LINES = 10
_SHOWN_STEPS = 12
_BAR = 20


class Shown:
    """The progress of one run."""

    def __init__(self, console: Console, bars: Progress | None, title: str, options: Options):
        self._console, self._bars, self._title = console, bars, title
        self._steps, self._tokens = options.steps, options.size.tokens
        self._done = 0
        self._started = time.perf_counter()
        if bars is not None:
            self._bar = bars.add_task(title, total=options.steps, loss="", rate="")

    def step(self, loss: float) -> None:
        """One step is done."""
        if not self._done:  # the first step plans; what counts is the pace after it
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
def bars(console: Console) -> Iterator[Progress | None]:
    """Progress bars, if there is a terminal to draw them on."""
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
def following(progress: Path, shown: Shown) -> Iterator[None]:
    """Show the steps that another process writes to a file, a loss a line, as they come."""
    ended = threading.Event()

    def follow() -> None:
        progress.touch()
        rest = ""
        with progress.open() as lines:
            while True:
                is_last = ended.is_set()
                *whole, rest = (rest + lines.read()).split("\n")
                for line in whole:
                    shown.step(float(line))
                if is_last:
                    return
                ended.wait(_LOOK_SECONDS)

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


def curves(on_mesh: Sequence[float], alone: Sequence[float], label: str) -> Table:
    """Both loss curves side by side, at some of the steps."""
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
