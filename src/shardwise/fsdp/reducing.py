"""Reductions: the gradients of a bucket on their way to the shards.

Forward they have been gathered; backward gradients are summed and scattered: the row of a rank
gets its piece of every gradient. In front of the pieces there is a flag for each parameter: whether
this rank had a gradient. Their sum tells a rank that had none whether any other did, so parameters
that only some ranks use need no agreement beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.comm import Communicator, Pending
from shardwise.errors import CollectiveError
from shardwise.fsdp.causes import reducing
from shardwise.fsdp.custom import ReduceScatter, process_group
from shardwise.fsdp.errors import FSDPError, GatherError
from shardwise.fsdp.held import Held, gradient_of, set_gradient
from shardwise.fsdp.pool import Pool, Rows, Size
from shardwise.fsdp.settings import Settings
from shardwise.fsdp.unit import Unit, aligned
from shardwise.torch_internals import as_local, storage_use_count

CHANNEL = "reduce"
_HALF = (torch.bfloat16, torch.float16)


class Entry(NamedTuple):
    """A parameter whose gradient is reduced."""

    held: Held
    flag: int
    offset: int
    """Where its pieces begin in a row."""
    is_direct: bool
    """Whether its pieces travel from where they are."""


class Plan:
    """Where the gradients of some units lie in a row.

    Arguments:
        units: of one arena and with equal settings.
        is_direct: whether large gradients may travel by themselves.
    """

    def __init__(self, units: Sequence[Unit], is_direct: bool) -> None:
        self.units = units
        first = units[0]
        dtype = first.dtype if first.reduce_dtype is None else first.reduce_dtype
        is_direct = is_direct and dtype is first.dtype and not first.follows_gradients
        self.flags = sum(len(unit.trainable) for unit in units)
        self.entries: dict[Unit, list[Entry]] = {unit: [] for unit in units}
        """Of each unit those of its trainable parameters, in their order."""
        self.length = aligned(self.flags)
        for directly in (False, True):  # those that travel by themselves come last
            flag = 0
            for unit in units:
                for index in unit.trainable:
                    held = unit.held[index]
                    if (held.is_direct and is_direct) is directly:
                        entry = Entry(held, flag, self.length, directly)
                        self.entries[unit].append(entry)
                        self.length += held.division.size
                    flag += 1
            if not directly:
                flat = self.length
        for entries in self.entries.values():
            entries.sort(key=lambda entry: entry.flag)
        self.size: Size = (first.info.shard_mesh_size, flat, dtype, first.device)
        """Of the rows, without what travels by itself; of a unit whose dtype follows the gradients,
        if these have the expected one."""
        self.row: Rows | None = None
        """Of a module that is not sharded: where the last gradients were."""
        self.own_holders = 0

    def places(self, unit: Unit, rows: torch.Tensor) -> list[torch.Tensor]:
        """Where the pieces of a unit's gradients go."""
        result = []
        for entry in self.entries[unit]:
            if not entry.is_direct:
                result += entry.held.division.of_gradient_rows(rows, entry.offset)
        return result


class Reduction:
    """The gradients of some units: put in, summed over ranks, and given to the shards.

    Arguments:
        plan: where they lie.
        settings: those of all these units' groups.
        pool: where memory comes from.
    """

    def __init__(self, plan: Plan, settings: Settings, pool: Pool) -> None:
        self.plan = plan
        self.info = plan.units[0].info
        self.settings = settings
        self.waits_for = {unit for unit in plan.units if unit.trainable}
        """Those whose gradients are not in yet."""
        self._pool = pool
        self._rows: Rows | None = None
        self._put: set[Unit] = set()
        self._direct: list[tuple[Entry, torch.Tensor]] = []
        """Large gradients, which travel by themselves."""
        self._unused: list[int] = []
        """The flags of parameters that have no gradient here."""
        self._pending: Pending[torch.Tensor]
        self._is_reduced = False
        self._dtype = plan.size[2]
        if settings.fill_unused:
            _check_unused(plan.units)

    @property
    def _average(self) -> bool:
        """Halves are divided where they are summed, in a wider dtype, so that no sum overflows."""
        return self.settings.divide_factor is None and self._dtype in _HALF

    @property
    def is_partial(self) -> bool:
        """Whether they are not summed over the replicate axis."""
        return self.info.replicate_mesh_size > 1 and not self.settings.all_reduce

    def put(self, unit: Unit) -> None:
        """Copy a unit's gradients in, and let go of them; what comes a second time is added."""
        gradients = unit.take_gradients()
        if unit in self._put:
            self._add(unit, gradients)
        else:
            self._put.add(unit)
            self._copy_in(unit, gradients)

    def _copy_in(self, unit: Unit, gradients: Sequence[Any]) -> None:
        self.waits_for.discard(unit)
        plan = self.plan
        with torch.no_grad(), as_local():
            rows = self._rows
            if rows is None:
                if unit.follows_gradients:
                    self._dtype = unit.dtype_for(gradients)
                rows = self._rows = self._taken()
                rows.matrix[:, : plan.flags] = 1
            flat: list[tuple[Entry, Any]] = []
            for entry, gradient in zip(plan.entries[unit], gradients, strict=True):
                if gradient is None:
                    self._unused.append(entry.flag)
                    rows.matrix[:, entry.flag] = 0
                if entry.is_direct:
                    self._direct.append((entry, _contiguous(gradient, entry.held, rows.matrix)))
                else:
                    flat.append((entry, gradient))
            if flat:
                self._copy_flat(unit, rows, flat)

    def _copy_flat(self, unit: Unit, rows: Rows, flat: list[tuple[Entry, Any]]) -> None:
        if any(gradient is None for _, gradient in flat):
            places, pieces = [], []
            for entry, gradient in flat:
                there = entry.held.division.of_gradient_rows(rows.matrix, entry.offset)
                if gradient is not None:
                    places += there
                    pieces += entry.held.division.of_gradient(gradient)
                    continue
                for place in there:
                    place.zero_()
        elif self.info.shard_mesh_size == 1 and all(
            gradient.dtype is self._dtype for _, gradient in flat
        ):
            first, last = flat[0][0], flat[-1][0]
            place = rows.matrix[0, first.offset : last.offset + last.held.division.size]
            torch.cat([gradient.reshape(-1) for _, gradient in flat], out=place)
            return
        else:
            key = (self.plan, unit.number)
            places = rows.views(key, lambda matrix: self.plan.places(unit, matrix))
            pieces = []
            for entry, gradient in flat:
                pieces += entry.held.division.of_gradient(gradient)
        if places:
            torch._foreach_copy_(places, pieces)

    def _add(self, unit: Unit, gradients: Sequence[torch.Tensor | None]) -> None:
        assert self._rows is not None, "some were put in before"
        matrix = self._rows.matrix
        with torch.no_grad(), as_local():
            for gradient, entry in zip(gradients, self.plan.entries[unit], strict=True):
                if gradient is None:
                    continue
                matrix[:, entry.flag] = 1
                if entry.flag in self._unused:
                    self._unused.remove(entry.flag)
                if entry.is_direct:
                    (before,) = (tensor for other, tensor in self._direct if other is entry)
                    before += gradient
                else:
                    division = entry.held.division
                    places = division.of_gradient_rows(matrix, entry.offset)
                    torch._foreach_add_(places, division.of_gradient(gradient))

    def _taken(self) -> Rows:
        plan = self.plan
        count, length, _, device = plan.size
        size = count, length, self._dtype, device
        if count > 1:
            return self._pool.take(size)
        # One row is what the gradients will be views of; it is used again if they are gone.
        is_fit = plan.row is not None and plan.row.size == size
        if plan.row is None or not is_fit or _holders(plan.row) > plan.own_holders:
            plan.row = Rows(size)
            plan.own_holders = _holders(plan.row)
        return plan.row

    def start(self) -> None:
        """Send them off."""
        for unit in list(self.waits_for):
            self.put(unit)
        for unit in self.plan.units:
            if unit not in self._put:  # it has no part in this backward
                self._copy_in(unit, [None] * len(unit.trainable))
        rows, self._rows = self._rows, None
        assert rows is not None, "there are gradients"
        custom = self.settings.reduce_scatter
        if self.info.shard_mesh_size == 1:
            self._pending = Pending.done(rows.matrix[0])
            self.go_on()
            return
        if custom is not None:
            pending = self._custom(custom, rows.matrix)
        else:
            shard = self.info.shard_communicator(CHANNEL)
            op = "avg" if self._average else "sum"
            with reducing(self.plan.units):
                if self._direct:
                    pending = self._start_direct(shard, rows.matrix, op)
                else:
                    summed = shard.reduce_scatter_async(rows.matrix, op=op)
                    pending = summed.then(lambda row: row[0])

        def finish() -> torch.Tensor:
            row = pending.wait()
            self._pool.give(rows)
            return row

        self._pending = Pending(finish)

    def _start_direct(
        self, shard: Communicator, rows: torch.Tensor, op: str
    ) -> Pending[torch.Tensor]:
        """Send large gradients from where they are, and only the others from the buffer."""
        row = rows.new_empty(self.plan.length)
        sent = [list(rows)]
        places = [row[: rows.shape[1]]]
        # In the order of all ranks, whatever came first here.
        for entry, gradient in sorted(self._direct, key=lambda each: each[0].flag):
            sent.append(entry.held.division.chunks(gradient))
            places.append(entry.held.division.own(row, entry.offset))
        self._direct = []
        return shard.reduce_scatter_in_place_async(sent, places, op).then(lambda _: row)

    def go_on(self) -> None:
        """Once they are summed over the shard axis, send them along the replicate axis."""
        if self._is_reduced:
            return
        self._is_reduced = True
        row = self._waited()
        with torch.no_grad():
            self._add_earlier(row)
        if self.info.replicate_mesh_size == 1 or self.is_partial:
            self._pending = Pending.done(row)
            return
        replicas = self.info.replicate_communicator(CHANNEL)
        op = "avg" if self._average else "sum"
        with reducing(self.plan.units):
            self._pending = replicas.all_reduce_async(row, op, in_place=True)

    def finish(self) -> None:
        """Give them to the shards."""
        self.go_on()
        row = self._waited()
        used = self._used(row)
        with torch.no_grad(), as_local():
            if self.is_partial:
                self._keep_reduced(row, used)
                return
            if not self._average:
                row.div_(self.settings.divide_factor or self.info.size)
            if self.settings.all_reduce_hook is not None:
                self.settings.all_reduce_hook(self._only_gradients(row))
            device = self.plan.units[0].arena.flat.device
            rows: dict[torch.dtype, torch.Tensor] = {}
            found = []
            for entries in self.plan.entries.values():
                for held, flag, offset, _ in entries:
                    if used[flag]:
                        dtype = row.dtype if held.grad_dtype is None else held.grad_dtype
                        if dtype not in rows:
                            rows[dtype] = row.to(device, dtype)
                        found.append((held, held.division.own(rows[dtype], offset)))
        found = [(held, held.hooked(piece)) for held, piece in found]
        totals, pieces = [], []
        with torch.no_grad(), as_local():
            for held, piece in found:
                total = gradient_of(held.sharded)
                if total is None:
                    set_gradient(held.sharded, piece)
                else:
                    totals.append(total)
                    pieces.append(piece)
            if totals:
                torch._foreach_add_(totals, pieces)
        for held, _ in found:
            held.call_hooks()

    def _only_gradients(self, row: torch.Tensor) -> torch.Tensor:
        """A row without its flags, and with zeros where another rank's pieces are longer."""
        for entries in self.plan.entries.values():
            for entry in entries:
                division = entry.held.division
                own = math.prod(division.shapes[division.index])
                row[entry.offset + own : entry.offset + division.size] = 0
        return row[aligned(self.plan.flags) :]

    def abandon(self) -> None:
        """Let it end, and forget what it brings."""
        with suppress(CollectiveError):
            self._pending.wait()

    def _waited(self) -> torch.Tensor:
        try:
            return self._pending.wait()
        except CollectiveError as error:
            names = "; ".join(unit.described() for unit in self.plan.units)
            raise GatherError(
                f"the gradients of {names} could not be reduced: {error}\nEvery rank of the mesh "
                "must run backward through the same sharded modules"
            ) from error

    def _used(self, row: torch.Tensor) -> list[bool]:
        """For each parameter whether any rank had a gradient."""
        used = [True] * self.plan.flags
        if self._unused and not self.settings.fill_unused:
            counts = row[: self.plan.flags].tolist()
            for flag in self._unused:
                used[flag] = counts[flag] > 0
        return used

    def _add_earlier(self, row: torch.Tensor) -> None:
        """What was summed over the shard axis before, and not along the other."""
        for entries in self.plan.entries.values():
            for held, flag, offset, _ in entries:
                if held.reduced is not None:
                    held.division.own(row, offset).add_(held.reduced)
                    row[flag] += 1
                    held.reduced = None

    def _keep_reduced(self, row: torch.Tensor, used: list[bool]) -> None:
        for entries in self.plan.entries.values():
            for held, flag, offset, _ in entries:
                if used[flag]:
                    held.reduced = held.division.own(row, offset)

    def _custom(self, custom: ReduceScatter, rows: torch.Tensor) -> Pending[torch.Tensor]:
        length = rows.shape[1]
        result = custom.allocate((length,), dtype=rows.dtype, device=rows.device)
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


def _check_unused(units: Sequence[Unit]) -> None:
    """Refuse zeros whose dtype ranks cannot know; all refuse, whatever gradients they have."""
    for unit in units:
        for index in unit.trainable:
            held = unit.held[index]
            if held.sum_dtype is None:
                raise FSDPError(
                    f"set_reduce_scatter_unused_params: {held.name} has grad_dtype None, so its "
                    "gradient may have any dtype, and ranks that have not used it do not know "
                    "which; set reduce_dtype of its MixedPrecisionPolicy"
                )


def _holders(rows: Rows) -> int:
    """How many tensors share its memory."""
    return storage_use_count(rows.memory.untyped_storage())


def _contiguous(gradient: torch.Tensor | None, held: Held, like: torch.Tensor) -> torch.Tensor:
    if gradient is None:
        return like.new_zeros(held.division.whole_shape)
    return gradient.to(like.dtype).contiguous()
