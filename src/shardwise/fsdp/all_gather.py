"""All_gathers of parameters: the rows of some units, from all ranks, under way."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm import Communicator, Pending
from shardwise.core.errors import CollectiveError
from shardwise.core.mesh import DeviceMesh
from shardwise.fsdp.config import AllGather
from shardwise.fsdp.errors import ADVICE, GatherError
from shardwise.fsdp.flat_buffer import (
    BufferPool,
    BufferSize,
    RowBuffer,
    header_digits,
    size_in_bytes,
)
from shardwise.fsdp.mesh_info import process_group_or_communicator
from shardwise.fsdp.unit import PendingGather, Unit, trace_gather

CHANNEL = "gather"
SKIP_OWN_BYTES = 1 << 20
"""From this size of the row buffer on, the own row is read from the shards and not copied in."""


class RowGather(PendingGather):
    """An all_gather of the rows of some units, as one row; starts at once.

    Forward: the rows of all ranks, from which each unit fills its gathered parameters.
    Backward: `shardwise.fsdp.reduce_scatter.GradReduction` sums the gradients into the shards.

    Arguments:
        units: neighbouring units of a bucket.
        pool: provides the row buffer.
        custom: the user's collective, in place of the communicator's.
    """

    def __init__(
        self, units: Sequence[Unit], pool: BufferPool, custom: AllGather | None = None
    ) -> None:
        first = units[0]
        self.first = first
        self._units = units
        self._starts = dict(zip(units, _starts_of(units), strict=True))
        """Where each unit begins in the row."""
        self._unfilled = len(units)
        """The number of units that have neither filled their parameters nor dropped the gather."""
        self._pool = pool
        self._has_arrived = False
        is_cast = first.dtype is not first.shard_dtype or first.device != first.shard_device
        row = None if is_cast or len(units) > 1 else first.row
        self._is_direct = bool(first.direct_params) and custom is None and len(units) == 1
        size = gather_buffer_size(units, self._is_direct)
        is_large = self._is_direct or size_in_bytes(size) >= SKIP_OWN_BYTES
        self._skips_own = is_large and row is not None and custom is None
        if custom is not None:
            self._rows = RowBuffer(size)
            own = self._copy_of_shards() if row is None else row
            self.pending = start_custom_gather(custom, own, self._rows, first)
        else:
            self._rows = pool.take(size)
            own = row if row is not None and self._skips_own else self._copy_in()
            if self._is_direct:
                self._start_direct(first, own)
            elif first.info.shard_mesh_size == 1:
                self.pending = Pending.done(self._rows.matrix)
            else:
                shard = self._communicator()
                with trace_gather(units):  # the own row is there already, or not needed
                    self.pending = shard.all_gather_into_async(
                        own, self._rows.matrix, skip_own=True
                    )
        for unit in units:
            unit.gather = self
            unit.note_versions()

    def _copy_in(self) -> torch.Tensor:
        """Copy the shards into this rank's row of the row buffer, and return it."""
        index = self.first.info.shard_mesh_rank
        key = "own", self._is_direct, *(unit.number for unit in self._units)
        own = self._rows.views(key, lambda matrix: self._pieces_of(matrix[index]))
        self._copy_shards(own[1:])
        return own[0]

    def _copy_of_shards(self) -> torch.Tensor:
        """Return a copy of the shards as a row."""
        _, length, dtype, device = self._rows.size
        own = self._pieces_of(torch.zeros(length, dtype=dtype, device=device))
        self._copy_shards(own[1:])
        return own[0]

    def _pieces_of(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Return a row, and the views of it that the shards are copied to."""
        pieces = [row]
        for unit, start in self._starts.items():
            part = row[start : start + unit.length]
            pieces += unit.row_pieces(part, self._is_direct)
        return pieces

    def _copy_shards(self, pieces: list[torch.Tensor]) -> None:
        shards = [each for unit in self._units for each in unit.shard_pieces(self._is_direct)]
        with torch.no_grad():
            torch._foreach_copy_(pieces, shards, non_blocking=True)

    def _start_direct(self, unit: Unit, row: torch.Tensor) -> None:
        """Gather direct parameters into their own memory, and the others into the row buffer."""
        shard = self._communicator()
        unit.allocate()
        own = [row[: unit.buffered_length], *(param.local for param in unit.direct_params)]
        targets = [list(self._rows.matrix), *(param.chunks for param in unit.direct_params)]
        with trace_gather([unit]):
            self.pending = shard.all_gather_in_place_async(own, targets).then(
                lambda _: self._rows.matrix
            )

    def _communicator(self) -> Communicator:
        """Return the communicator of the shard axis. Its first use creates a process group: a
        collective, which fails if a rank does not take part."""
        try:
            return self.first.info.shard_communicator(CHANNEL)
        except CollectiveError as error:
            raise self._error(error) from error

    def fill(self, unit: Unit) -> None:
        """Wait for the rows, and fill the gathered parameters of a unit."""
        if not self._has_arrived:
            self._wait()
        unit.fill(self._rows, self._starts[unit], self._skips_own, self._is_direct)
        self._release(unit)

    def drop(self, unit: Unit) -> None:
        """Wait for the rows, and discard those of a unit."""
        try:
            self.pending.wait()
        finally:
            unit.free()  # a direct gather has allocated it, and other units may have kept it
            self._release(unit)

    def _release(self, unit: Unit) -> None:
        unit.gather = None
        self._unfilled -= 1
        if not self._unfilled:
            self._pool.give(self._rows)

    def _wait(self) -> None:
        try:
            self.pending.wait()
        except CollectiveError as error:
            raise self._error(error) from error
        self._check_header(self._rows.matrix)
        self._has_arrived = True

    def _error(self, error: CollectiveError) -> GatherError:
        return GatherError(
            f"the parameters of {self._names} could not be gathered: {error}\n{ADVICE}"
        )

    @property
    def _names(self) -> str:
        return ", ".join(unit.name for unit in self._units)

    def _check_header(self, rows: torch.Tensor) -> None:
        """Raise `GatherError` if another rank has sent the row of another unit."""
        if rows.device.type != "cpu" or rows.dtype is torch.bool:
            return  # reading the rows would stall an accelerator
        own = header_digits(self.first.number)
        unwritten = self.first.info.shard_mesh_rank if self._skips_own else None
        for index, found in enumerate(rows[:, :2].tolist()):
            if found != own and index != unwritten:
                other = int(found[0]) + 128 * int(found[1])
                rank = self.first.info.shard_ranks[index]
                raise GatherError(
                    f"rank {rank} gathers unit {other} where this one gathers {self._names}, unit "
                    f"{self.first.number}\n{ADVICE}"
                )


class PostForwardGather(PendingGather):
    """An all_gather of a unit that was sharded over a few ranks between forward and backward."""

    def __init__(self, unit: Unit, communicator: Communicator) -> None:
        assert unit.post_forward_shard is not None, "it is SHARDED_POST_FORWARD"
        with trace_gather([unit]):
            self.pending = communicator.all_gather_async(unit.post_forward_shard)
        unit.gather = self

    def fill(self, unit: Unit) -> None:
        """Wait for the parts, and fill the gathered parameters of the unit."""
        try:
            memory = self.pending.wait()
        except CollectiveError as error:
            raise GatherError(
                f"the parameters of {unit.describe()} could not be gathered: {error}"
            ) from error
        unit.refill(memory)
        unit.gather = None

    def drop(self, unit: Unit) -> None:
        """Wait for the parts, and discard them."""
        self.pending.wait()
        unit.free()
        unit.gather = None


def post_forward_mesh(unit: Unit, count: int) -> tuple[DeviceMesh, int]:
    """Return the mesh of the `count` ranks that a unit is sharded over after forward, and this
    rank's index in it."""
    ranks = unit.info.shard_ranks
    index = unit.info.shard_mesh_rank
    first = index // count * count
    device = unit.info.mesh.device_type
    return DeviceMesh(device, ranks[first : first + count]), index - first


def _starts_of(units: Sequence[Unit]) -> list[int]:
    """Return where each unit begins in the row of all of them."""
    return [0, *itertools.accumulate(unit.length for unit in units[:-1])]


def gather_buffer_size(units: Sequence[Unit], is_direct: bool) -> BufferSize:
    """Return the size of the row buffer for neighbouring units.

    Arguments:
        is_direct: whether direct parameters are gathered in place; only for a single unit.
    """
    first = units[0]
    length = first.buffered_length if is_direct else sum(unit.length for unit in units)
    return first.info.shard_mesh_size, length, first.dtype, first.device


def start_custom_gather(
    custom: AllGather, own: torch.Tensor, rows: RowBuffer, unit: Unit
) -> Pending[Any]:
    """Start a gather with the user's collective.

    Arguments:
        own: this rank's row.
        rows: the buffer to fill; `custom` allocates its memory.
    """
    rows.matrix = custom.allocate(
        (rows.matrix.numel(),), dtype=own.dtype, device=own.device
    ).view_as(rows.matrix)
    work = custom(
        output_tensor=rows.matrix.view(-1),
        input_tensor=own,
        group=process_group_or_communicator(unit.info),
        async_op=True,
    )

    def finish() -> torch.Tensor:
        if work is not None:
            work.wait()
        return rows.matrix

    return Pending(finish)
