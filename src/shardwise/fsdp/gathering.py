"""Gathers: the rows of consecutive units, from all ranks, under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm import Communicator, Pending
from shardwise.errors import CollectiveError
from shardwise.fsdp.arena import digits
from shardwise.fsdp.causes import gathering
from shardwise.fsdp.custom import AllGather, process_group
from shardwise.fsdp.errors import ADVICE, GatherError
from shardwise.fsdp.pool import Pool, Rows, Size, size_in_bytes
from shardwise.fsdp.unit import Unit
from shardwise.mesh import DeviceMesh

CHANNEL = "gather"
LARGE = 1 << 20


class Gather:
    """The rows of units that lie side by side. Starts at once.

    Arguments:
        units: consecutive ones of an arena.
        pool: where the memory for them comes from.
        custom: what gathers them, if not the communicator.
    """

    def __init__(self, units: Sequence[Unit], pool: Pool, custom: AllGather | None = None) -> None:
        first, last = units[0], units[-1]
        self.first = first
        self._start = first.offset
        self._left = len(units)
        """How many units have not got their parameters."""
        self._units = units
        self._pool = pool
        self._is_there = False
        length = last.offset + last.length - first.offset
        own = first.arena.flat.detach()[self._start : self._start + length]
        is_cast = own.dtype is not first.dtype or own.device != first.device
        own = own.to(first.device, first.dtype, non_blocking=True)
        self._is_direct = bool(first.direct) and custom is None and len(units) == 1
        size = gathered_size(units, self._is_direct)
        # A large own row is not copied among the others: its pieces are taken from where it is.
        is_large = self._is_direct or size_in_bytes(size) >= LARGE
        self._skips_own = is_large and not is_cast and custom is None
        if self._is_direct:
            self._rows = pool.take(size)
            self._start_direct(first)
        elif custom is not None:
            self._rows = Rows(size)
            self.pending = custom_gather(custom, own, self._rows, first)
        else:
            self._rows = pool.take(size)
            if first.info.shard_mesh_size == 1:
                self.pending = Pending.done(self._rows.matrix.copy_(own))
            else:
                shard = self._communicator()
                with gathering(units):
                    self.pending = shard.all_gather_into_async(
                        own, self._rows.matrix, skip_own=self._skips_own
                    )
        for unit in units:
            unit.gather = self
            unit.note_versions()

    def _start_direct(self, unit: Unit) -> None:
        """Gather large parameters to where they belong, and only the others into the buffer."""
        shard = self._communicator()
        unit.allocate()
        row = unit.arena.flat.detach()[unit.offset : unit.offset + unit.flat_length]
        own = [row, *map(unit.own, unit.direct)]
        places = [list(self._rows.matrix), *(held.chunks for held in unit.direct)]
        with gathering([unit]):
            self.pending = shard.all_gather_in_place_async(own, places).then(
                lambda _: self._rows.matrix
            )

    def _communicator(self) -> Communicator:
        """How the ranks talk. The first time they meet to make a group, and one may not come."""
        try:
            return self.first.info.shard_communicator(CHANNEL)
        except CollectiveError as error:
            raise self._failed(error) from error

    def fill(self, unit: Unit) -> None:
        """Let a unit have its parameters, once they are there."""
        if not self._is_there:
            self._wait()
        unit.fill(self._rows, unit.offset - self._start, self._skips_own, self._is_direct)
        self._let_go(unit)

    def drop(self, unit: Unit) -> None:
        """A unit does not need it any more, without having had it."""
        try:
            self.pending.wait()
        finally:
            unit.free()  # a direct one has got memory, another may have kept some
            self._let_go(unit)

    def _let_go(self, unit: Unit) -> None:
        unit.gather = None
        self._left -= 1
        if not self._left:
            self._pool.give(self._rows)

    def _wait(self) -> None:
        try:
            self.pending.wait()
        except CollectiveError as error:
            raise self._failed(error) from error
        self._check(self._rows.matrix)
        self._is_there = True

    def _failed(self, error: CollectiveError) -> GatherError:
        return GatherError(
            f"the parameters of {self._names} could not be gathered: {error}\n{ADVICE}"
        )

    @property
    def _names(self) -> str:
        return ", ".join(unit.name for unit in self._units)

    def _check(self, rows: torch.Tensor) -> None:
        """Refuse rows of other units, which ranks that went another way have sent."""
        if rows.device.type != "cpu" or rows.dtype is torch.bool:
            return  # to look at them would stall a device
        own = digits(self.first.number)
        unwritten = self.first.info.shard_mesh_rank if self._skips_own else None
        for index, found in enumerate(rows[:, :2].tolist()):
            if found != own and index != unwritten:
                other = int(found[0]) + 128 * int(found[1])
                rank = self.first.info.shard_ranks[index]
                raise GatherError(
                    f"rank {rank} gathers unit {other} where this one gathers {self._names}, unit "
                    f"{self.first.number}\n{ADVICE}"
                )


class KeptGather:
    """What `Unit.keep` has split over a few ranks, from those."""

    def __init__(self, unit: Unit, communicator: Any) -> None:
        assert unit.kept is not None, "it is SHARDED_POST_FORWARD"
        with gathering([unit]):
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

    def drop(self, unit: Unit) -> None:
        """A unit does not need it any more."""
        self.pending.wait()
        unit.free()
        unit.gather = None


def kept_mesh(unit: Unit, count: int) -> tuple[DeviceMesh, int]:
    """The ranks that a unit is split over after forward, and this rank's position there."""
    ranks = unit.info.shard_ranks
    index = unit.info.shard_mesh_rank
    first = index // count * count
    device = unit.info.mesh.device_type
    return DeviceMesh(device, ranks[first : first + count]), index - first


def gathered_size(units: Sequence[Unit], is_direct: bool) -> Size:
    """Of the buffer for the rows of consecutive units.

    Arguments:
        is_direct: leave out what travels by itself; of one unit.
    """
    first, last = units[0], units[-1]
    length = first.flat_length if is_direct else last.offset + last.length - first.offset
    return first.info.shard_mesh_size, length, first.dtype, first.device


def custom_gather(
    custom: AllGather, own: torch.Tensor, rows: Rows, unit: Unit
) -> Pending[torch.Tensor]:
    """A gather with communication of the user's.

    Arguments:
        own: this rank's row.
        rows: what to fill; it gets the memory that `custom` wants.
    """
    rows.matrix = custom.allocate(
        (rows.matrix.numel(),), dtype=own.dtype, device=own.device
    ).view_as(rows.matrix)
    work = custom(
        output_tensor=rows.matrix.view(-1),
        input_tensor=own,
        group=process_group(unit.info),
        async_op=True,
    )

    def finish() -> torch.Tensor:
        if work is not None:
            work.wait()
        return rows.matrix

    return Pending(finish)
