"""The demo from start to end."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console

from shardwise.demo.display import (
    RunProgress,
    communication_table,
    follow_losses,
    loss_table,
    progress_bars,
    save_plot,
    shard_table,
)
from shardwise.demo.options import Options
from shardwise.demo.training import WEIGHTS, Outcome, alone, load_weights, on_each_rank
from shardwise.examples.train_llama import all_tokens, batches
from shardwise.run.launch import launch

TOLERANCE = 1e-4
"""The largest difference between the losses of the two runs."""
PLOT = "losses.png"


def run(options: Options, console: Console | None = None) -> bool:
    """Train on a mesh of processes and in one process; return whether both agree."""
    console = console or Console()
    started = time.perf_counter()
    label = f"{options.ranks} processes ({options.label})"
    model = options.size.model
    console.print(
        f"A language model of {model.layers} layers, {model.width} wide, learns from the help of "
        f"Python: {options.steps} steps of {options.size.tokens} bytes. Once on {options.ranks} "
        f"processes joined by gloo, as a mesh of {_format_axes(options)}, and once in one process.",
        highlight=False,
    )
    outcomes, single = _train(options, console, label)
    ours = outcomes[0]

    console.print(shard_table(outcomes))
    console.print(communication_table(ours.events))
    console.print(loss_table(ours.losses, single.losses, label))
    agree = _print_agreement(console, ours, single)
    loads = _print_saved(console, options, ours, single, label)
    seconds = time.perf_counter() - started
    console.print(
        f"{_format_rates(options, ours, single)} In all {seconds:.0f} s.", highlight=False
    )
    return agree and loads


def _format_axes(options: Options) -> str:
    """Format the mesh, such as `2 (dp: parts of the batch) x 2 (tp: parts of the model)`."""
    sizes = zip(options.mesh, options.parallelism.axes.items(), strict=True)
    return " x ".join(f"{size} ({axis}: {splits.value})" for size, (axis, splits) in sizes)


def _train(options: Options, console: Console, label: str) -> tuple[list[Outcome], Outcome]:
    """Run both trainings, and show their progress; return the outcomes of all ranks, and that of
    one process."""
    with tempfile.TemporaryDirectory() as folder, progress_bars(console) as progress:
        lines = Path(folder) / "losses"
        mesh_bar = RunProgress(console, progress, label, options)
        single_bar = RunProgress(console, progress, "one process", options)
        with follow_losses(lines, mesh_bar):
            outcomes = launch(on_each_rank, options.ranks, options, lines)
        single = alone(options, single_bar.step)
    return outcomes, single


def _print_agreement(console: Console, ours: Outcome, single: Outcome) -> bool:
    """Print whether the losses of both runs agree, and return it."""
    largest = max(abs(a - b) for a, b in zip(ours.losses, single.losses, strict=True))
    if largest <= TOLERANCE:
        console.print(
            f"[green]The losses agree[/]: they differ by {largest:.1e} at most, and may by "
            f"{TOLERANCE:.0e}.",
            highlight=False,
        )
        return True
    console.print(
        f"[red]The losses differ[/] by {largest:.1e}, and may by {TOLERANCE:.0e}.", highlight=False
    )
    return False


def _print_saved(
    console: Console, options: Options, ours: Outcome, single: Outcome, label: str
) -> bool:
    """Save the plot, check the saved weights, and print both; return whether the weights are
    right."""
    plot = options.output / PLOT
    if save_plot(plot, ours.losses, single.losses, label):
        console.print(f"The loss curves are drawn in {plot}.", highlight=False)
    else:
        console.print(
            "There is no plot, as matplotlib is not installed: pip install matplotlib.",
            highlight=False,
        )
    path = options.output / WEIGHTS
    difference = abs(_loss_of(path, options) - ours.last_loss)
    if difference <= TOLERANCE:
        console.print(
            f"The weights are in {path}: loaded by one process, they give the loss of the mesh on "
            f"new text ({ours.last_loss:.4f}).",
            highlight=False,
        )
        return True
    console.print(
        f"[red]The weights in {path} are wrong[/]: loaded by one process, their loss on new text "
        f"differs by {difference:.1e} from that of the mesh.",
        highlight=False,
    )
    return False


def _loss_of(path: Path, options: Options) -> float:
    """Return the loss of the weights in a file on the batch after the last one of the training."""
    size = options.size
    data = batches(all_tokens(), size.batch, size.length, options.seed)
    for _ in range(options.steps):
        next(data)
    with torch.no_grad():
        return load_weights(path).loss(*next(data)).item()


def _format_rates(options: Options, ours: Outcome, single: Outcome) -> str:
    tokens = options.steps * options.size.tokens
    return (
        f"{options.ranks} processes: {tokens / ours.seconds:,.0f} tokens/s; one process: "
        f"{tokens / single.seconds:,.0f} (all of them share the cores of this host)."
    )
