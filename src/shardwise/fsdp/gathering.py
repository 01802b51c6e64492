"""Gathers: the rows of consecutive units, from all ranks, under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm import Pending
from shardwise.errors import CollectiveError
from shardwise.fsdp.arena import digits
from shardwise.fsdp.custom import AllGather, process_group
from shardwise.fsdp.errors import GatherError
from shardwise.fsdp.unit import Unit

CHANNEL = "gather"


class Gather:
    """The rows of units that lie side by side. Starts at once.

    Arguments:
        units: consecutive ones of an arena.
        custom: what gathers them, if not the communicator.
    """

    def __init__(self, units: Sequence[Unit], custom: AllGather | None = None) -> None:
        first, last = units[0], units[-1]
        self.first = first
        self.start = first.offset
        self.length = last.offset + last.length - first.offset
        own = first.arena.flat.detach()[self.start : self.start + self.length]
        own = own.to(first.device, first.dtype, non_blocking=True)
        self._names = ", ".join(unit.name for unit in units)
        self._rows: torch.Tensor | None = None
        if first.info.shard_mesh_size == 1:
            self.pending = Pending.done(own)
        elif custom is None:
            shard = first.info.shard_communicator(CHANNEL)
            self.pending = shard.all_gather_async(own)
        else:
            self.pending = _custom(custom, own, first)
        for unit in units:
            unit.gather = self

    def rows(self) -> torch.Tensor:
        """Those of all ranks, one below the other, once they are there."""
        if self._rows is None:
            try:
                rows = self.pending.wait()
            except CollectiveError as error:
                raise GatherError(
                    f"the parameters of {self._names} could not be gathered: {error}\nEvery rank "
                    "of the mesh must call the same sharded modules in the same order; a rank that "
                    "has no use for one calls it too, and multiplies its output by 0"
                ) from error
            self._rows = rows.view(self.first.info.shard_mesh_size, self.length)
            self._check(self._rows)
        return self._rows

    def fill(self, unit: Unit) -> None:
        """Let a unit have its parameters."""
        unit.fill(self.rows(), unit.offset - self.start)
        unit.gather = None

    def _check(self, rows: torch.Tensor) -> None:
        """Refuse rows of other units, which ranks that went another way have sent."""
        if rows.device.type != "cpu" or rows.dtype is torch.bool:
            return  # to look at them would stall a device
        own = digits(self.first.number)
        for index, found in enumerate(rows[:, :2].tolist()):
            if found != own:
                other = int(found[0]) + 128 * int(found[1])
                rank = self.first.info.shard_ranks[index]
                raise GatherError(
                    f"rank {rank} gathers unit {other} where this one gathers {self._names}, unit "
                    f"{self.first.number}: ranks must call the same sharded modules in the same "
                    "order; a rank that has no use for one calls it too, and multiplies its output "
                    "by 0"
                )


class KeptGather:
    """What `Unit.keep` has split over a few ranks, from those."""

    def __init__(self, unit: Unit, communicator: Any) -> None:
        assert unit.kept is not None, "it is SHARDED_POST_FORWARD"
        self.pending = communicator.all_gather_async(unit.kept)
        unit.gather = self  # type: ignore[assignment]

    def fill(self, unit: Unit) -> None:
        """Let a unit have its parameters."""
        try:
            whole = self.pending.wait()
        except CollectiveError as error:
            raise GatherError(
                f"the parameters of {unit.described()} could not be gathered: {error}"
            ) from error
        unit.refill(whole)
        unit.gather = None


def _custom(custom: AllGather, own: torch.Tensor, unit: Unit) -> Pending[torch.Tensor]:
    size = unit.info.shard_mesh_size
    result = custom.allocate((own.numel() * size,), dtype=own.dtype, device=own.device)
    group = process_group(unit.info)
    work = custom(output_tensor=result, input_tensor=own, group=group, async_op=True)

    def finish() -> torch.Tensor:
        if work is not None:
            work.wait()
        return result

    return Pending(finish)
