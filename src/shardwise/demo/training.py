"""The training itself: the same code for a rank of a mesh and for one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from shardwise import DTensor, Event, init_device_mesh, listen, world
from shardwise.box import Box
from shardwise.demo.modes import Feed, spread
from shardwise.demo.options import Options
from shardwise.demo.saving import save_weights
from shardwise.examples.llama import Llama
from shardwise.examples.text import all_tokens, batches

LAYER = "layers.0."
"""The layer of the picture."""
_HEARD_STEP = 1
"""The step whose collectives are shown: not the first, which also makes groups of processes."""

Report = Callable[[float], None]
"""Told the loss after each step."""


@dataclass
class Outcome:
    """What a run has to tell."""

    losses: list[float]
    seconds: float
    last_loss: float
    """Of one more batch, after the training."""
    events: list[Event] = field(default_factory=list)
    """The collectives of one step, as this rank sees them."""
    position: dict[str, int] = field(default_factory=dict)
    """Where this rank is along the axes on which ranks hold different parts."""
    pieces: dict[str, tuple[tuple[int, ...], Box]] = field(default_factory=dict)
    """Of each weight of one layer the whole shape, and what this rank holds."""


def train(model: Llama, options: Options, feed: Feed, report: Report) -> Outcome:
    """Train a model, plain or laid out on a mesh."""
    rank = world.current().rank
    size = options.size
    # A large eps, as weights whose gradient is next to nothing would follow its rounding.
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate, eps=1e-5)
    data = batches(all_tokens(), size.batch, size.length, options.seed)
    losses: list[float] = []
    events: list[Event] = []
    started = time.perf_counter()
    heard = min(_HEARD_STEP, options.steps - 1)
    for step in range(options.steps):
        with listen(events.append) if step == heard else nullcontext():
            losses.append(_step(model, optimizer, feed, next(data)))
        report(losses[-1])
    seconds = time.perf_counter() - started
    with torch.no_grad():
        last = feed.mean(model.loss(*feed.part(next(data))))
    # Simulated ranks hear each other.
    return Outcome(losses, seconds, last, [event for event in events if event.rank == rank])


def _step(
    model: Llama, optimizer: torch.optim.Optimizer, feed: Feed, batch: tuple[Tensor, Tensor]
) -> float:
    loss = model.loss(*feed.part(batch))
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return feed.mean(loss)


def make_model(options: Options) -> Llama:
    """The model at the start, the same in every process."""
    torch.manual_seed(options.seed)
    return Llama(options.size.model)


def on_each_rank(options: Options, progress: Path) -> Outcome:
    """What every rank of the mesh runs. The first writes a line for each step to `progress`."""
    mode = options.way
    mesh = init_device_mesh("cpu", options.mesh, tuple(mode.axes))
    model = make_model(options)
    spread(model, mesh, mode, options.sequence_parallel)
    feed = Feed(mesh[mode.fed_axes] if mode.fed_axes else None)
    is_first = mesh.get_rank() == 0
    with progress.open("a") as lines:

        def report(loss: float) -> None:
            if is_first:
                print(loss, file=lines, flush=True)

        outcome = train(model, options, feed, report)
    for name, parameter in model.named_parameters():
        if name.startswith(LAYER) and isinstance(parameter, DTensor):
            outcome.pieces[name] = tuple(parameter.shape), parameter.box
    outcome.position = {axis: mesh.get_local_rank(axis) for axis in mode.holding_axes}
    save_weights(model, options, is_first)
    return outcome


def alone(options: Options, report: Report) -> Outcome:
    """The same run in this process, on one thread as each rank has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(make_model(options), options, Feed(), report)
    finally:
        torch.set_num_threads(threads)
