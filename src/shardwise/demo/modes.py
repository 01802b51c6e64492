"""The ways to spread the demo's model over processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from shardwise import DeviceMesh, DTensor, Partial
from shardwise.examples.llama import Config, Llama
from shardwise.fsdp import fully_shard
from shardwise.parallel import plans, shard_module


class Splits(Enum):
    """What the ranks along an axis share out among them."""

    BATCH = "parts of the batch"
    MODEL = "parts of the model"
    PARAMETERS = "parts of the batch and, at rest, of the parameters"


@dataclass(frozen=True)
class Mode:
    """One way.

    Arguments:
        axes: of the mesh, each with what it splits.
    """

    axes: dict[str, Splits]

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether ranks compute with parts of the model."""
        return Splits.MODEL in self.axes.values()

    @property
    def fed_axes(self) -> tuple[str, ...]:
        """The axes along which each rank feeds the model its own part of a batch. Elsewhere all
        feed it the whole batch, which the plan cuts."""
        if Splits.PARAMETERS not in self.axes.values():
            return ()
        return tuple(name for name, splits in self.axes.items() if splits is not Splits.MODEL)

    @property
    def holding_axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold different parts of the parameters."""
        return tuple(name for name, splits in self.axes.items() if splits is not Splits.BATCH)


MODES = {
    "dp+tp": Mode({"dp": Splits.BATCH, "tp": Splits.MODEL}),
    "fsdp": Mode({"dp": Splits.PARAMETERS}),
    "hsdp": Mode({"replicate": Splits.BATCH, "shard": Splits.PARAMETERS}),
    "tp": Mode({"tp": Splits.MODEL}),
    "fsdp+tp": Mode({"dp": Splits.PARAMETERS, "tp": Splits.MODEL}),
}


def spread(model: Llama, mesh: DeviceMesh, mode: Mode, sequence_parallel: bool) -> None:
    """Lay out a model on a mesh, in place."""
    if mode.is_tensor_parallel:
        plan = _plan(model.config, mode, sequence_parallel)
        shard_module(model, mesh["tp"] if mode.fed_axes else mesh, plan)
    if mode.fed_axes:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh[mode.fed_axes])
        fully_shard(model, mesh=mesh[mode.fed_axes])


def _plan(config: Config, mode: Mode, sequence_parallel: bool) -> plans.Plan:
    return plans.llama(
        "tp",
        data_axis="dp" if mode.axes.get("dp") is Splits.BATCH else None,
        sequence_parallel=sequence_parallel,
        head_dim=config.head_width,
        queries_per_key=config.heads // config.kv_heads,
    )


class Feed:
    """How batches come to a model, and losses from it.

    Arguments:
        mesh: the ranks that feed it their own parts of a batch; None if it gets the whole.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self._mesh = mesh

    def part(self, batch: Sequence[Tensor]) -> list[Tensor]:
        """What this rank feeds, of tokens and targets."""
        mesh = self._mesh
        if mesh is None:
            return list(batch)
        position = mesh.ranks_along(range(mesh.ndim)).index(mesh.get_rank())
        return [each.chunk(mesh.size())[position] for each in batch]

    def mean(self, loss: Tensor) -> float:
        """The loss of the whole batch."""
        if self._mesh is None:
            return loss.item()
        if isinstance(loss, DTensor):  # on the tensor-parallel ranks
            loss = loss.full_tensor()
        parts = [Partial("avg")] * self._mesh.ndim
        return DTensor.from_local(loss.detach(), self._mesh, parts).item()
