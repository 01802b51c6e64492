"""Reductions: the gradients of a bucket on their way to the shards.

Forward they have been gathered; backward gradients are summed and scattered: the row of a rank
gets its piece of every gradient. In front of the pieces there is a flag for each parameter: whether
this rank had a gradient. Their sum tells a rank that had none whether any other did, so parameters
that only some ranks use need no agreement beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from shardwise.comm import Pending
from shardwise.errors import CollectiveError
from shardwise.fsdp.custom import ReduceScatter, process_group
from shardwise.fsdp.errors import GatherError
from shardwise.fsdp.settings import Settings
from shardwise.fsdp.unit import Held, Unit, aligned, gradient_of, set_gradient
from shardwise.tensor import as_local

CHANNEL = "reduce"
_HALF = (torch.bfloat16, torch.float16)


class Reduction:
    """The gradients of some units: put in, summed over ranks, and given to the shards.

    Arguments:
        units: of one arena and with equal settings.
    """

    def __init__(self, units: Sequence[Unit], settings: Settings) -> None:
        first = units[0]
        self.units = units
        self.info = first.info
        self.settings = settings
        self.waits_for = {unit for unit in units if unit.trainable}
        """Those whose gradients are not in yet."""
        self._entries: dict[Unit, list[tuple[Held, int, int]]] = {}
        """Of each unit its parameters, each with its flag and where its pieces begin."""
        flags = sum(len(unit.trainable) for unit in units)
        length, flag = aligned(flags), 0
        for unit in units:
            entries = self._entries[unit] = []
            for index in unit.trainable:
                held = unit.held[index]
                entries.append((held, flag, length))
                length += held.division.size
                flag += 1
        self._flags = flags
        self._length = length
        self._rows: torch.Tensor | None = None
        self._unused: list[int] = []
        """The flags of parameters that have no gradient here."""
        self._pending: Pending[torch.Tensor]
        self._is_reduced = False
        # Halves are divided where they are summed, in a wider dtype, so that no sum overflows.
        self._average = settings.divide_factor is None and first.reduce_dtype in _HALF

    def put(self, unit: Unit) -> None:
        """Copy a unit's gradients in, and let go of them."""
        gradients = unit.take_gradients()
        self.waits_for.discard(unit)
        places: list[torch.Tensor] = []
        pieces: list[torch.Tensor] = []
        with torch.no_grad(), as_local():
            rows = self._rows
            if rows is None:
                size = (self.info.shard_mesh_size, self._length)
                rows = torch.empty(size, dtype=unit.reduce_dtype, device=unit.device)
                rows[:, : self._flags] = 1
                self._rows = rows
            for gradient, (held, flag, offset) in zip(gradients, self._entries[unit], strict=True):
                division = held.division
                if gradient is None:
                    self._unused.append(flag)
                    rows[:, flag] = 0
                    for place in division.of_gradient_rows(rows, offset):
                        place.zero_()
                else:
                    places += division.of_gradient_rows(rows, offset)
                    pieces += division.of_gradient(gradient)
            if places:
                torch._foreach_copy_(places, pieces)

    def start(self) -> None:
        """Send them off."""
        for unit in list(self.waits_for):
            self.put(unit)
        rows, self._rows = self._rows, None
        assert rows is not None, "there are gradients"
        custom = self.settings.reduce_scatter
        if self.info.shard_mesh_size == 1:
            self._pending = Pending.done(rows[0])
        elif custom is not None:
            self._pending = self._custom(custom, rows)
        else:
            shard = self.info.shard_communicator(CHANNEL)
            op = "avg" if self._average else "sum"
            self._pending = shard.reduce_scatter_async(rows, op=op).then(lambda row: row[0])

    def go_on(self) -> None:
        """Once they are summed over the shard axis, send them along the replicate axis."""
        if self._is_reduced:
            return
        self._is_reduced = True
        row = self._waited()
        with torch.no_grad():
            self._add_earlier(row)
        if self.info.replicate_mesh_size == 1 or not self.settings.all_reduce:
            self._pending = Pending.done(row)
            return
        replicas = self.info.replicate_communicator(CHANNEL)
        op = "avg" if self._average else "sum"
        self._pending = replicas.all_reduce_async(row, op, in_place=True)

    def finish(self) -> None:
        """Give them to the shards."""
        self.go_on()
        row = self._waited()
        used = self._used(row)
        with torch.no_grad(), as_local():
            if self.info.replicate_mesh_size > 1 and not self.settings.all_reduce:
                self._keep_reduced(row, used)
                return
            if not self._average:
                row.div_(self.settings.divide_factor or self.info.size)
            if self.settings.all_reduce_hook is not None:
                self.settings.all_reduce_hook(row)
            shards = self.units[0].arena.flat
            row = row.to(shards.device, shards.dtype)
            totals, pieces = [], []
            for entries in self._entries.values():
                for held, flag, offset in entries:
                    if not used[flag]:
                        continue
                    piece = held.division.own(row, offset)
                    total = gradient_of(held.sharded)
                    if total is None:
                        set_gradient(held.sharded, piece)
                    else:
                        totals.append(total)
                        pieces.append(piece)
            if totals:
                torch._foreach_add_(totals, pieces)

    def abandon(self) -> None:
        """Let it end, and forget what it brings."""
        with suppress(CollectiveError):
            self._pending.wait()

    def _waited(self) -> torch.Tensor:
        try:
            return self._pending.wait()
        except CollectiveError as error:
            names = "; ".join(unit.described() for unit in self.units)
            raise GatherError(
                f"the gradients of {names} could not be reduced: {error}\nEvery rank of the mesh "
                "must run backward through the same sharded modules"
            ) from error

    def _used(self, row: torch.Tensor) -> list[bool]:
        """For each parameter whether any rank had a gradient."""
        used = [True] * self._flags
        if self._unused and not self.settings.fill_unused:
            counts = row[: self._flags].tolist()
            for flag in self._unused:
                used[flag] = counts[flag] > 0
        return used

    def _add_earlier(self, row: torch.Tensor) -> None:
        """What was summed over the shard axis before, and not along the other."""
        for entries in self._entries.values():
            for held, flag, offset in entries:
                if held.reduced is not None:
                    held.division.own(row, offset).add_(held.reduced)
                    row[flag] += 1
                    held.reduced = None

    def _keep_reduced(self, row: torch.Tensor, used: list[bool]) -> None:
        for entries in self._entries.values():
            for held, flag, offset in entries:
                if used[flag]:
                    held.reduced = held.division.own(row, offset)

    def _custom(self, custom: ReduceScatter, rows: torch.Tensor) -> Pending[torch.Tensor]:
        result = custom.allocate((self._length,), dtype=rows.dtype, device=rows.device)
        work = custom(
            output_tensor=result,
            input_tensor=rows.view(-1),
            group=process_group(self.info),
            op=dist.ReduceOp.SUM,
            async_op=True,
        )

        def finish() -> torch.Tensor:
            if work is not None:
                work.wait()
            return result.div_(self.info.shard_mesh_size) if self._average else result

        return Pending(finish)
