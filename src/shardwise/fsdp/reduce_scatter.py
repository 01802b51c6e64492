"""Reduce_scatters of gradients: from gradients of gathered parameters to gradients of shards.

Forward: an all_gather of the shards (`shardwise.fsdp.all_gather`). Backward: a reduce_scatter of
the gradients, which gives each rank the sum of its piece of every gradient; with HSDP an all_reduce
along the replicate axis follows. Each row begins with a flag for each parameter: 1 if the rank has
a gradient of it. The summed flags tell a rank without a gradient whether any other rank has one,
so ranks need not agree beforehand on the parameters that are used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.comm import Communicator, Pending
from shardwise.core.errors import CollectiveError
from shardwise.fsdp.config import GroupSettings, ReduceScatter
from shardwise.fsdp.errors import FSDPError, GatherError, StateError
from shardwise.fsdp.flat_buffer import BufferPool, BufferSize, RowBuffer, aligned
from shardwise.fsdp.mesh_info import process_group_or_communicator
from shardwise.fsdp.param import ShardedParam, get_grad, set_grad
from shardwise.fsdp.unit import Unit, trace_reduction
from shardwise.torch_internals import as_local, storage_use_count

CHANNEL = "reduce"
_HALF = (torch.bfloat16, torch.float16)


class GradEntry(NamedTuple):
    """A parameter whose gradient is reduced."""

    param: ShardedParam
    flag: int
    """The position of its flag in a row."""
    offset: int
    """Where its gradient begins in a row."""
    is_direct: bool
    """Whether its gradient is sent in place, without a copy through the row buffer."""


class ReducePlan:
    """The positions of the gradients of some units in a row.

    Arguments:
        units: units of one bucket.
        is_direct: whether large gradients may be sent in place.
    """

    def __init__(self, units: Sequence[Unit], is_direct: bool) -> None:
        self.units = units
        first = units[0]
        dtype = first.dtype if first.reduce_dtype is None else first.reduce_dtype
        is_direct = is_direct and dtype is first.dtype and not first.follows_grad_dtypes
        self.flags = sum(len(unit.trainable) for unit in units)
        """The number of flags at the start of a row."""
        self.entries: dict[Unit, list[GradEntry]] = {unit: [] for unit in units}
        """For each unit the entries of its trainable parameters, in their order."""
        self.length = aligned(self.flags)
        for directly in (False, True):  # gradients that are sent in place come last
            flag = 0
            for unit in units:
                for index in unit.trainable:
                    param = unit.params[index]
                    if (param.is_direct and is_direct) is directly:
                        entry = GradEntry(param, flag, self.length, directly)
                        self.entries[unit].append(entry)
                        self.length += param.sharding.size
                    flag += 1
            if not directly:
                buffered_length = self.length
        for entries in self.entries.values():
            entries.sort(key=lambda entry: entry.flag)
        self.size: BufferSize = (first.info.shard_mesh_size, buffered_length, dtype, first.device)
        """Of the row buffer, without gradients that are sent in place. A unit that follows the
        dtypes of its gradients may need a buffer of another dtype."""
        self.row: RowBuffer | None = None
        """The row that the last gradients of a replicated module are views of."""
        self.own_references = 0
        """How many tensors share that memory while no gradient does."""

    def row_pieces(self, unit: Unit, matrix: torch.Tensor) -> list[torch.Tensor]:
        """Return the views of the row buffer that a unit's gradients are copied to."""
        result = []
        for entry in self.entries[unit]:
            if not entry.is_direct:
                result += entry.param.sharding.pieces_of_grad_rows(matrix, entry.offset)
        return result


class GradReduction:
    """One reduction of the gradients of some units: collected, summed, and given to the shards.

    The steps are `put` (for each unit), `start` (reduce_scatter), `start_all_reduce` (along the
    replicate axis) and `finish`.

    Arguments:
        plan: the positions of the gradients in a row.
        settings: of these units' groups.
        pool: provides the row buffer.
        makes_graph: whether the shards' gradients get a history, through which they can be
            differentiated.
    """

    def __init__(
        self,
        plan: ReducePlan,
        settings: GroupSettings,
        pool: BufferPool,
        makes_graph: bool = False,
    ) -> None:
        self.plan = plan
        self._makes_graph = makes_graph
        self._with_history: dict[ShardedParam, torch.Tensor] = {}
        """If so, the gradients of the gathered parameters."""
        self.info = plan.units[0].info
        self.settings = settings
        self.waits_for = {unit for unit in plan.units if unit.trainable}
        """The units whose gradients have not been put in yet."""
        self._pool = pool
        self._rows: RowBuffer | None = None
        self._put: set[Unit] = set()
        self._direct: list[tuple[GradEntry, torch.Tensor]] = []
        """The gradients that are sent in place."""
        self._unused: list[int] = []
        """The flags of parameters that have no gradient on this rank."""
        self._pending: Pending[torch.Tensor]
        self._is_scattered = False
        """Whether the reduce_scatter is over."""
        self._dtype = plan.size[2]
        if settings.fill_unused:
            _check_grad_dtypes_known(plan.units)

    @property
    def _op(self) -> str:
        """The reduction of the collective. Half-precision sums could overflow, so the collective
        averages them, in a wider dtype. Other sums are divided at the end."""
        return "avg" if self._is_averaged else "sum"

    @property
    def _is_averaged(self) -> bool:
        is_free = self.settings.divide_factor is None and not self.settings.sums_only
        return is_free and self._dtype in _HALF

    @property
    def is_partial(self) -> bool:
        """Whether the gradients are left without the sum over the replicate axis."""
        return self.info.replicate_mesh_size > 1 and not self.settings.all_reduce

    # ---- collecting gradients

    def put(self, unit: Unit) -> None:
        """Move the gradients of a unit into the row buffer. If the unit has put gradients before,
        add to them."""
        if self._makes_graph:
            self._check_may_keep_history(unit)
        gradients = unit.take_grads()
        if self._makes_graph:
            self._keep_history(unit, gradients)
        if unit in self._put:
            self._add(unit, gradients)
        else:
            self._put.add(unit)
            self._copy_in(unit, gradients)

    def _check_may_keep_history(self, unit: Unit) -> None:
        """Raise `StateError` if the history of gradients would be incomplete."""
        found = None
        if self.is_partial:
            found = "are not summed over the replicate axis: call set_requires_all_reduce(True)"
        elif any(each.accumulated is not None for each in unit.params):
            found = "were accumulated over backwards in another dtype: reduce them in each backward"
        if found is not None:
            raise StateError(
                f"backward(create_graph=True): the gradients of {unit.describe()} could not be "
                f"differentiated, because they {found}"
            )

    def _keep_history(self, unit: Unit, gradients: Sequence[torch.Tensor | None]) -> None:
        with torch.enable_grad(), as_local():
            for entry, gradient in zip(self.plan.entries[unit], gradients, strict=True):
                if gradient is not None:
                    earlier = self._with_history.get(entry.param)
                    total = gradient if earlier is None else earlier + gradient
                    self._with_history[entry.param] = total

    def _copy_in(self, unit: Unit, gradients: Sequence[Any]) -> None:
        self.waits_for.discard(unit)
        plan = self.plan
        with torch.no_grad(), as_local():
            rows = self._rows
            if rows is None:
                if unit.follows_grad_dtypes:
                    self._dtype = unit.reduce_dtype_for(gradients)
                rows = self._rows = self._take_rows()
                rows.matrix[:, : plan.flags] = 1
            buffered: list[tuple[GradEntry, Any]] = []
            for entry, gradient in zip(plan.entries[unit], gradients, strict=True):
                if gradient is None:
                    self._unused.append(entry.flag)
                    rows.matrix[:, entry.flag] = 0
                if entry.is_direct:
                    self._direct.append((entry, _as_contiguous(gradient, entry.param, rows.matrix)))
                else:
                    buffered.append((entry, gradient))
            if buffered:
                self._copy_buffered(unit, rows, buffered)

    def _copy_buffered(
        self, unit: Unit, rows: RowBuffer, buffered: list[tuple[GradEntry, Any]]
    ) -> None:
        """Copy gradients into the row buffer; a parameter without a gradient contributes zeros."""
        if any(gradient is None for _, gradient in buffered):
            targets, sources = [], []
            for entry, gradient in buffered:
                pieces = entry.param.sharding.pieces_of_grad_rows(rows.matrix, entry.offset)
                if gradient is not None:
                    targets += pieces
                    sources += entry.param.sharding.pieces_of_grad(gradient)
                    continue
                for piece in pieces:
                    piece.zero_()
        elif self.info.shard_mesh_size == 1 and all(
            gradient.dtype is self._dtype for _, gradient in buffered
        ):
            first, last = buffered[0][0], buffered[-1][0]
            target = rows.matrix[0, first.offset : last.offset + last.param.sharding.size]
            torch.cat([gradient.reshape(-1) for _, gradient in buffered], out=target)
            return
        else:
            key = (self.plan, unit.number)
            targets = rows.views(key, lambda matrix: self.plan.row_pieces(unit, matrix))
            sources = []
            for entry, gradient in buffered:
                sources += entry.param.sharding.pieces_of_grad(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _add(self, unit: Unit, gradients: Sequence[torch.Tensor | None]) -> None:
        assert self._rows is not None, "gradients of the unit were put in before"
        matrix = self._rows.matrix
        with torch.no_grad(), as_local():
            for gradient, entry in zip(gradients, self.plan.entries[unit], strict=True):
                if gradient is None:
                    continue
                matrix[:, entry.flag] = 1
                if entry.flag in self._unused:
                    self._unused.remove(entry.flag)
                if entry.is_direct:
                    (total,) = (tensor for other, tensor in self._direct if other is entry)
                    total += gradient
                else:
                    sharding = entry.param.sharding
                    totals = sharding.pieces_of_grad_rows(matrix, entry.offset)
                    torch._foreach_add_(totals, sharding.pieces_of_grad(gradient))

    def _take_rows(self) -> RowBuffer:
        plan = self.plan
        count, length, _, device = plan.size
        size = count, length, self._dtype, device
        if count > 1:
            return self._pool.take(size)
        # The gradients will be views of this row, which is reused once they are gone.
        has_size = plan.row is not None and plan.row.size == size
        if plan.row is None or not has_size or _count_references(plan.row) > plan.own_references:
            plan.row = RowBuffer(size)
            plan.own_references = _count_references(plan.row)
        return plan.row

    # ---- collectives

    def start(self) -> None:
        """Start the reduce_scatter; units without gradients contribute zeros."""
        for unit in list(self.waits_for):
            self.put(unit)
        for unit in self.plan.units:
            if unit not in self._put:  # no module used it in this iteration
                self._copy_in(unit, [None] * len(unit.trainable))
        rows, self._rows = self._rows, None
        assert rows is not None, "a plan has at least one unit"
        custom = self.settings.reduce_scatter
        if self.info.shard_mesh_size == 1:
            self._pending = Pending.done(rows.matrix[0])
            self.start_all_reduce()
            return
        if custom is not None:
            pending = self._start_custom(custom, rows.matrix)
        else:
            shard = self.info.shard_communicator(CHANNEL)
            with trace_reduction(self.plan.units):
                if self._direct:
                    pending = self._start_direct(shard, rows.matrix)
                else:
                    summed = shard.reduce_scatter_async(rows.matrix, op=self._op)
                    pending = summed.then(lambda row: row[0])

        def finish() -> torch.Tensor:
            row = pending.wait()
            self._pool.give(rows)
            return row

        self._pending = Pending(finish)

    def _start_direct(self, shard: Communicator, rows: torch.Tensor) -> Pending[torch.Tensor]:
        """Send large gradients in place, and the others from the row buffer."""
        row = rows.new_empty(self.plan.length)
        sources = [list(rows)]
        targets = [row[: rows.shape[1]]]
        # Sorted, as gradients may be computed in another order on another rank.
        for entry, gradient in sorted(self._direct, key=lambda each: each[0].flag):
            sources.append(entry.param.sharding.chunks(gradient))
            targets.append(entry.param.sharding.own_shard(row, entry.offset))
        self._direct = []
        return shard.reduce_scatter_in_place_async(sources, targets, self._op).then(lambda _: row)

    def start_all_reduce(self) -> None:
        """Wait for the reduce_scatter, and start the all_reduce along the replicate axis, if any.
        A second call does nothing."""
        if self._is_scattered:
            return
        self._is_scattered = True
        row = self._wait()
        with torch.no_grad():
            self._add_partial_grads(row)
        if self.info.replicate_mesh_size == 1 or self.is_partial:
            self._pending = Pending.done(row)
            return
        replicas = self.info.replicate_communicator(CHANNEL)
        with trace_reduction(self.plan.units):
            self._pending = replicas.all_reduce_async(row, self._op, in_place=True)

    def abandon(self) -> None:
        """Wait for the collective under way, and discard its result."""
        with suppress(CollectiveError):
            self._pending.wait()

    def _wait(self) -> torch.Tensor:
        try:
            return self._pending.wait()
        except CollectiveError as error:
            names = "; ".join(unit.describe() for unit in self.plan.units)
            raise GatherError(
                f"the gradients of {names} could not be reduced: {error}\nEvery rank of the mesh "
                "must run backward through the same sharded modules"
            ) from error

    # ---- reduced gradients

    def finish(self) -> None:
        """Wait for all collectives, and give the shards their gradients."""
        self.start_all_reduce()
        row = self._wait()
        used = self._find_used(row)
        with torch.no_grad(), as_local():
            if self.is_partial:
                self._keep_partial_grads(row, used)
                return
            if not self._is_averaged:
                row.div_(self.settings.divide_factor or self.info.size)
            if self.settings.all_reduce_hook is not None:
                self.settings.all_reduce_hook(self._without_flags(row))
            device = self.plan.units[0].shard_device
            rows: dict[torch.dtype, torch.Tensor] = {}
            grads = []
            for entries in self.plan.entries.values():
                for param, flag, offset, _ in entries:
                    if used[flag]:
                        dtype = row.dtype if param.grad_dtype is None else param.grad_dtype
                        if dtype not in rows:
                            rows[dtype] = row.to(device, dtype)
                        grads.append((param, param.sharding.own_shard(rows[dtype], offset)))
        if self._makes_graph:
            grads = [(param, self._attach_history(param, grad)) for param, grad in grads]
        grads = [(param, param.apply_grad_hooks(grad, self._makes_graph)) for param, grad in grads]
        totals, addends = [], []
        with torch.no_grad(), as_local():
            for param, grad in grads:
                total = get_grad(param.sharded)
                if total is None:
                    set_grad(param.sharded, grad)
                elif self._makes_graph:
                    with torch.enable_grad():
                        set_grad(param.sharded, total + grad)
                else:
                    totals.append(total)
                    addends.append(grad)
            if totals:
                torch._foreach_add_(totals, addends)
        for param, _ in grads:
            param.call_post_accumulate_hooks()

    def _attach_history(self, param: ShardedParam, grad: torch.Tensor) -> torch.Tensor:
        (unit,) = (each for each in self.plan.units if param in each.params)
        return unit.reduction_of(param).attach(self._with_history.pop(param, None), grad)

    def _without_flags(self, row: torch.Tensor) -> torch.Tensor:
        """Return the gradients of a row, with zeros after shards that are shorter than others'."""
        for entries in self.plan.entries.values():
            for entry in entries:
                sharding = entry.param.sharding
                own = math.prod(sharding.shapes[sharding.index])
                row[entry.offset + own : entry.offset + sharding.size] = 0
        return row[aligned(self.plan.flags) :]

    def _find_used(self, row: torch.Tensor) -> list[bool]:
        """Return for each parameter whether any rank has a gradient."""
        used = [True] * self.plan.flags
        if self._unused and not self.settings.fill_unused:
            counts = row[: self.plan.flags].tolist()
            for flag in self._unused:
                used[flag] = counts[flag] > 0
        return used

    def _add_partial_grads(self, row: torch.Tensor) -> None:
        """Add the gradients of earlier backwards that were left without the sum over the replicate
        axis."""
        for entries in self.plan.entries.values():
            for param, flag, offset, _ in entries:
                if param.reduced is not None:
                    param.sharding.own_shard(row, offset).add_(param.reduced)
                    row[flag] += 1
                    param.reduced = None

    def _keep_partial_grads(self, row: torch.Tensor, used: list[bool]) -> None:
        for entries in self.plan.entries.values():
            for param, flag, offset, _ in entries:
                if used[flag]:
                    param.reduced = param.sharding.own_shard(row, offset)

    def _start_custom(self, custom: ReduceScatter, rows: torch.Tensor) -> Pending[torch.Tensor]:
        length = rows.shape[1]
        result = custom.allocate((length,), dtype=rows.dtype, device=rows.device)
        work = custom(
            output_tensor=result,
            input_tensor=rows.view(-1),
            group=process_group_or_communicator(self.info),
            op=dist.ReduceOp.SUM,
            async_op=True,
        )

        def finish() -> torch.Tensor:
            if work is not None:
                work.wait()
            return result.div_(self.info.shard_mesh_size) if self._is_averaged else result

        return Pending(finish)


def _check_grad_dtypes_known(units: Sequence[Unit]) -> None:
    """Raise `FSDPError` if a rank cannot know the dtype of a gradient that it lacks. All ranks
    raise it, whether or not they have the gradient."""
    for unit in units:
        for index in unit.trainable:
            param = unit.params[index]
            if param.sum_dtype is None:
                raise FSDPError(
                    f"set_reduce_scatter_unused_params: {param.name} has grad_dtype None, so its "
                    "gradient may have any dtype, and ranks that have not used it do not know "
                    "which; set reduce_dtype of its MixedPrecisionPolicy"
                )


def _count_references(rows: RowBuffer) -> int:
    """Return how many tensors share the memory of a buffer."""
    return storage_use_count(rows.memory.untyped_storage())


def _as_contiguous(
    gradient: torch.Tensor | None, param: ShardedParam, like: torch.Tensor
) -> torch.Tensor:
    if gradient is None:
        return like.new_zeros(param.sharding.gathered_shape)
    return gradient.to(like.dtype).contiguous()
