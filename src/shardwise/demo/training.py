"""The training of the demo: the same code for a rank of a mesh and for one process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from shardwise import DeviceMesh, DTensor, Event, Partial, init_device_mesh, listen
from shardwise.core import world
from shardwise.core.box import Box
from shardwise.demo.options import Mode, Options, Splits
from shardwise.examples.llama import Config, Llama
from shardwise.examples.train_llama import all_tokens, batches
from shardwise.fsdp import fully_shard
from shardwise.parallel import plans, shard_module

LAYER = "layers.0."
"""The prefix of the weights whose shards are shown."""
_TRACED_STEP = 1
"""The step whose collectives are shown: not the first, which also makes process groups."""

ReportLoss = Callable[[float], None]
"""A function that gets the loss after each step."""


WEIGHTS = "model.safetensors"
"""The name of the file that the weights are saved in."""


# ---- the model on a mesh


def distribute_model(model: Llama, mesh: DeviceMesh, mode: Mode, sequence_parallel: bool) -> None:
    """Distribute a model over a mesh, in place."""
    if mode.is_tensor_parallel:
        plan = _plan(model.config, mode, sequence_parallel)
        shard_module(model, mesh["tp"] if mode.fed_axes else mesh, plan)
    if mode.fed_axes:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh[mode.fed_axes])
        fully_shard(model, mesh=mesh[mode.fed_axes])


def _plan(config: Config, mode: Mode, sequence_parallel: bool) -> plans.ModelPlan:
    """Return the plan of tensor parallelism, and of data parallelism if it is not FSDP's."""
    return plans.llama(
        "tp",
        data_axis="dp" if mode.axes.get("dp") is Splits.BATCH else None,
        sequence_parallel=sequence_parallel,
        head_dim=config.head_width,
        queries_per_key=config.heads // config.kv_heads,
    )


class Feed:
    """The input and the loss of a model: which part of a batch a rank feeds, and the mean of the
    losses.

    Arguments:
        mesh: the ranks that feed their own parts of a batch; None if all feed the whole.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self._mesh = mesh

    def part(self, batch: Sequence[Tensor]) -> list[Tensor]:
        """Return the part of tokens and targets that this rank feeds."""
        mesh = self._mesh
        if mesh is None:
            return list(batch)
        position = mesh.ranks_along(range(mesh.ndim)).index(mesh.get_rank())
        return [each.chunk(mesh.size())[position] for each in batch]

    def mean(self, loss: Tensor) -> float:
        """Return the loss of the whole batch."""
        if self._mesh is None:
            return loss.item()
        if isinstance(loss, DTensor):  # replicated over the tensor-parallel ranks
            loss = loss.full_tensor()
        parts = [Partial("avg")] * self._mesh.ndim
        return DTensor.from_local(loss.detach(), self._mesh, parts).item()


# ---- the training


@dataclass
class Outcome:
    """The results of a run."""

    losses: list[float]
    seconds: float
    last_loss: float
    """The loss of one more batch, after the training."""
    events: list[Event] = field(default_factory=list)
    """The collectives of one step that this rank took part in."""
    position: dict[str, int] = field(default_factory=dict)
    """The position of this rank along the axes whose ranks hold different parameters."""
    pieces: dict[str, tuple[tuple[int, ...], Box]] = field(default_factory=dict)
    """For each weight of one layer its whole shape, and the box that this rank holds."""


def train(model: Llama, options: Options, feed: Feed, report: ReportLoss) -> Outcome:
    """Train a model, plain or distributed over a mesh."""
    rank = world.current().rank
    size = options.size
    # A large eps: otherwise the rounding of tiny gradients decides the steps of their weights.
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate, eps=1e-5)
    data = batches(all_tokens(), size.batch, size.length, options.seed)
    losses: list[float] = []
    events: list[Event] = []
    started = time.perf_counter()
    traced_step = min(_TRACED_STEP, options.steps - 1)
    for step in range(options.steps):
        with listen(events.append) if step == traced_step else nullcontext():
            losses.append(_step(model, optimizer, feed, next(data)))
        report(losses[-1])
    seconds = time.perf_counter() - started
    with torch.no_grad():
        last = feed.mean(model.loss(*feed.part(next(data))))
    # Simulated ranks are in one process, whose listeners get the events of all ranks.
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
    """Return the model at the start, the same in every process."""
    torch.manual_seed(options.seed)
    return Llama(options.size.model)


def on_each_rank(options: Options, progress: Path) -> Outcome:
    """Train on the mesh; every rank runs this. The first writes the loss of each step to a line of
    `progress`."""
    mode = options.parallelism
    mesh = init_device_mesh("cpu", options.mesh, tuple(mode.axes))
    model = make_model(options)
    distribute_model(model, mesh, mode, options.sequence_parallel)
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


def alone(options: Options, report: ReportLoss) -> Outcome:
    """Train in this process, on one thread as each rank has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(make_model(options), options, Feed(), report)
    finally:
        torch.set_num_threads(threads)


# ---- the weights


def save_weights(model: Llama, options: Options, is_first: bool) -> None:
    """Gather all weights, in which all ranks take part, and let the first rank write them to a
    file.

    A weight with two names is written once, under the first name.
    """
    full = {
        name: each.full_tensor() if isinstance(each, DTensor) else each.detach()
        for name, each in model.named_parameters()
    }
    if is_first:
        contents = {name: each.contiguous() for name, each in full.items()}
        metadata = {"config": json.dumps(asdict(model.config))}
        safetensors.torch.save_file(contents, options.output / WEIGHTS, metadata)


def load_weights(path: Path) -> Llama:
    """Return the plain model that was saved, for one process."""
    with safetensors.safe_open(path, "pt") as file:
        config = Config(**json.loads(file.metadata()["config"]))
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    model = Llama(config)
    model.load_state_dict(weights, strict=not config.tied)
    return model
