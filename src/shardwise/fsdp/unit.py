"""Units: parameters of a group that are gathered together.

The parameters of a unit have one dtype and are gathered into one piece of memory. At rest their
shards are consecutive in a *row*, which has the same length on every rank. A gather
brings the rows of all ranks, from which one fused copy fills the gathered parameters. The gathered
parameters are the same tensor objects as long as the unit exists; only their memory is freed after
forward and filled again for backward. So tensors that autograd has saved in forward stay valid.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import increment_version

from shardwise.comm import trace
from shardwise.comm.trace import Cause, trace_scope
from shardwise.core import world
from shardwise.core.tensor_state import user_attributes
from shardwise.dtensor.later_sums import sum_later
from shardwise.dtensor.tensor import GRADIENT_SOURCE, wrap
from shardwise.fsdp.errors import ShardedState, transition
from shardwise.fsdp.flat_buffer import RowBuffer, aligned, header_digits, lay_out_row
from shardwise.fsdp.grad_graph import Reduction, ShardGradient
from shardwise.fsdp.param import ShardedParam, get_grad, promoted_dtype, set_grad
from shardwise.torch_internals import PARAMETER_FLAG, TensorBase, as_local, storage_id, version_of

if TYPE_CHECKING:
    from shardwise.fsdp.param_group import ParamGroup

_requires_grad: Callable[[torch.Tensor], bool] = TensorBase.requires_grad.__get__


class PendingGather(ABC):
    """A gather under way, for one unit or several."""

    @abstractmethod
    def fill(self, unit: Unit) -> None:
        """Wait for the gather, and fill the gathered parameters of a unit."""

    @abstractmethod
    def drop(self, unit: Unit) -> None:
        """Wait for the gather, and discard its result for a unit."""


class Unit:
    """Parameters that are gathered together.

    Arguments:
        number: its position among all units, the same on every rank.
        groups: the groups that compute with it: one, or several if parameters are tied.
        params: its parameters, which have the same dtype, device and `param_dtype`.
        device: where the gathered parameters are; shards may be kept elsewhere.
        reduce_dtype: the dtype in which gradients are reduced, if it is known in advance. Gradients
            that may have any dtype may need a wider one.
    """

    def __init__(
        self,
        number: int,
        groups: list[ParamGroup],
        params: list[ShardedParam],
        device: torch.device,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self.number = number
        self.groups = groups
        self.params = params
        self.info = params[0].slot.info
        self.device = device
        self.dtype = params[0].gathered_dtype
        """Of the gathered parameters, and of the rows that are sent."""
        self.reduce_dtype = reduce_dtype
        self.follows_grad_dtypes = any(each.sum_dtype is None for each in params)
        """Whether the dtype of its reductions depends on the gradients."""
        self.length, self.buffered_length = lay_out_row(params, self.dtype, device)
        self.direct_params = [each for each in params if each.is_direct]
        self.row: torch.Tensor | None = None
        """The memory of all shards; None if some shards are elsewhere."""
        self.shard_dtype, self.shard_device = params[0].sharded.dtype, params[0].sharded.device
        self._addresses: list[int] = []
        """Where the shards are."""
        self.state = ShardedState.SHARDED
        self.is_alias = False
        """Whether the gathered parameters are views of the shards, which are entire."""
        self.holders: set[ParamGroup] = set()
        """The groups that need it gathered now."""
        self.gather: PendingGather | None = None
        """The gather under way that will fill it, if any."""
        self.post_forward_shard: torch.Tensor | None = None
        """Its part of the gathered memory in SHARDED_POST_FORWARD."""
        self.post_forward_count = 0
        """Of how many equal parts that is one; the settings may have changed since."""
        self.versions: list[int] = []
        """Of the shards when they were gathered."""
        self.params_with_grad: set[int] = set()
        """Indices of the parameters whose gradients this backward has accumulated."""
        self.trainable: list[int] = []
        """Indices of the parameters that require gradients."""
        self.hooked: set[int] = set()
        """Indices of the gathered parameters that have a gradient hook."""
        self.on_grads_ready: Callable[[Unit], None]
        """Called once all trainable parameters have their gradients."""

    @property
    def name(self) -> str:
        """The names of its groups."""
        return " and ".join(group.name for group in self.groups)

    def describe(self) -> str:
        """Return its name and those of its parameters."""
        names = [each.name for each in self.params]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return f"{self.name} ({shown})"

    # ---- memory

    def find_shards(self) -> None:
        """Note where the shards are; within `as_local()`."""
        for each in self.params:
            each.local = TensorBase.data.__get__(each.sharded)
        self._addresses = [_address(each.sharded) for each in self.params]

    def has_shards_in_place(self) -> bool:
        """Return whether all shards are still where they were; within `as_local()`."""
        for each, address in zip(self.params, self._addresses, strict=True):
            if each.sharded.dtype is not self.shard_dtype or _address(each.sharded) != address:
                return False
        return True

    def use_row(self, row: torch.Tensor | None) -> None:
        """Send the shards from a row that they are in; None if they are elsewhere."""
        self._header = torch.tensor(
            header_digits(self.number), dtype=self.shard_dtype, device=self.shard_device
        )
        self.row = row
        if row is not None:
            row[:2] = self._header

    def row_pieces(self, row: torch.Tensor, is_direct: bool) -> list[torch.Tensor]:
        """Return the views of a row that `shard_pieces` are copied to."""
        if self.row is not None:
            return [row]
        params = [each for each in self.params if not (is_direct and each.is_direct)]
        return [row[:2], *(each.sharding.own_shard(row, each.offset) for each in params)]

    def shard_pieces(self, is_direct: bool) -> list[torch.Tensor]:
        """Return the shards as the pieces of this rank's row.

        Arguments:
            is_direct: whether direct parameters are sent in place, apart from the row.
        """
        if self.row is not None:
            return [self.row[: self.buffered_length] if is_direct else self.row]
        params = [each for each in self.params if not (is_direct and each.is_direct)]
        return [self._header, *(each.local for each in params)]

    def make_gathered_params(self) -> None:
        """Create the gathered parameters: without memory, or as views of the shards if each shard
        is the whole parameter."""
        self.is_alias = (
            self.info.shard_mesh_size == 1
            and self.dtype is self.shard_dtype
            and self.device == self.shard_device
        )
        self._targets: dict[Hashable, list[torch.Tensor]] = {}
        if self.is_alias:
            for each in self.params:
                self._set_gathered(each, each.local)
            return
        sizes = [aligned(torch.Size(each.sharding.gathered_shape).numel()) for each in self.params]
        # After forward it may be split into equal parts, for any divisor of the shard ranks.
        total = -(-sum(sizes) // self.info.shard_mesh_size) * self.info.shard_mesh_size
        self.memory = torch.empty(total, dtype=self.dtype, device=self.device)
        self.nbytes = total * self.dtype.itemsize
        # Filling `.data` does not count as a change of the tensors that autograd has saved.
        data = self.memory.data
        start = 0
        self._data_views: list[tuple[ShardedParam, torch.Tensor]] = []
        for each, size in zip(self.params, sizes, strict=True):
            shape, strides = each.sharding.gathered_shape, each.strides
            self._set_gathered(each, self.memory.as_strided(shape, strides, start))
            view = data.as_strided(shape, strides, start)
            self._data_views.append((each, view))
            if each.is_direct:
                each.chunks = each.sharding.chunks(view)
            start += size
        self.free()

    def _set_gathered(self, param: ShardedParam, memory: torch.Tensor) -> None:
        if param.sharding.gathered_layout is not None:
            memory = wrap(memory.view_as(memory), param.sharding.gathered_layout)
        gathered: Any = nn.Parameter(memory, requires_grad=False)
        param.gathered = gathered
        if self.info.spmd_mesh is not None:
            sum_later(gathered, self.info.spmd_mesh, self.info.spmd_axes)
        setattr(param.sharded, GRADIENT_SOURCE, ShardGradient(self, param))
        if param.sum_dtype is not self.dtype:
            gathered.grad_dtype = None  # else autograd would round gradients of a wider dtype
        for name, value in user_attributes(param.sharded).items():
            if name not in ("_layout", PARAMETER_FLAG, "_gathered_strides", GRADIENT_SOURCE):
                setattr(gathered, name, value)

    def allocate(self) -> None:
        """Allocate the memory of the gathered parameters, unless it was kept. (A resize to the same
        size would move it.)"""
        storage = self.memory.untyped_storage()
        if storage.nbytes() != self.nbytes:
            storage.resize_(self.nbytes)

    def free(self) -> None:
        """Free the memory of the gathered parameters, unless users want to keep it."""
        if not self.keeps_storage:
            self.memory.untyped_storage().resize_(0)

    @property
    def keeps_storage(self) -> bool:
        """Whether the memory of the gathered parameters stays allocated."""
        return any(group.settings.keep_unsharded_storage for group in self.groups)

    def free_kept_storage(self) -> None:
        """Free memory that was kept and is not in use."""
        is_in_use = self.gather is not None or self.state is ShardedState.UNSHARDED
        if not is_in_use and not self.is_alias:
            self.free()

    @property
    def is_gathered(self) -> bool:
        """Whether the gathered parameters have their values."""
        return self.is_alias or self.state is ShardedState.UNSHARDED

    @property
    def gathered_bytes(self) -> int:
        """The memory that it uses beyond its shards."""
        if self.is_alias:
            return 0
        kept = self.post_forward_shard
        kept_bytes = 0 if kept is None else kept.untyped_storage().nbytes()
        return self.memory.untyped_storage().nbytes() + kept_bytes

    def owns_storage(self, address: int) -> bool:
        """Return whether a storage, given by its address, is the memory of the gathered parameters,
        which will be freed."""
        return not self.is_alias and storage_id(self.memory.untyped_storage()) == address

    # ---- sharded and gathered

    def fill(self, rows: RowBuffer, start: int, skips_own: bool, is_direct: bool = False) -> None:
        """Fill the gathered parameters from the rows of all ranks.

        Arguments:
            rows: may have the rows of other units too.
            start: where this unit begins in each row.
            skips_own: whether this rank's own row is missing: its part is read from the shards.
            is_direct: whether the direct parameters are filled already, except for the own part.
        """
        key = self.number, start, skips_own, is_direct
        with torch.no_grad():
            if not is_direct:
                self.allocate()
            targets = self._targets.get(key)
            if targets is None:
                targets = self._targets[key] = self._make_targets(skips_own, is_direct)
            sources = rows.views(
                key, lambda matrix: self._make_sources(matrix, start, skips_own, is_direct)
            )
            if targets:  # none if all parameters are empty on this rank
                torch._foreach_copy_(targets, sources)
        self.state = transition(self.state, ShardedState.UNSHARDED, self.name)

    def _make_targets(self, skips_own: bool, is_direct: bool) -> list[torch.Tensor]:
        result: list[torch.Tensor] = []
        for each, view in self._data_views:
            if is_direct and each.is_direct:
                result.append(each.chunks[each.sharding.index])
            else:
                result += each.sharding.pieces_of_gathered(view, skips_own)
        return result

    def _make_sources(
        self, matrix: torch.Tensor, start: int, skips_own: bool, is_direct: bool
    ) -> list[torch.Tensor]:
        result: list[torch.Tensor] = []
        for each in self.params:
            if is_direct and each.is_direct:
                result.append(each.local)
                continue
            own = None
            if skips_own:
                assert self.row is not None, "otherwise the own row was copied"
                own = self.row[each.offset : each.offset + each.sharding.size]
            result += each.sharding.pieces_of_rows(matrix, start + each.offset, own)
        return result

    def reshard_post_forward(self, index: int, count: int) -> None:
        """Free the gathered memory except for one of `count` equal parts, which is kept."""
        with torch.no_grad():
            self.post_forward_shard = self.memory.view(count, -1)[index].clone()
        self.post_forward_count = count
        self.free()
        self.state = transition(self.state, ShardedState.SHARDED_POST_FORWARD, self.name)

    def refill(self, memory: torch.Tensor) -> None:
        """Fill the gathered parameters from all parts that `reshard_post_forward` has made."""
        with torch.no_grad():
            self.allocate()
            self.memory.data.copy_(memory)
        self.post_forward_shard = None
        self.state = transition(self.state, ShardedState.UNSHARDED, self.name)

    def reshard(self) -> None:
        """Free the memory of the gathered parameters."""
        self.holders.clear()
        if self.state is not ShardedState.SHARDED:
            if not self.is_alias:
                self.free()
            self.post_forward_shard = None
            self.state = transition(self.state, ShardedState.SHARDED, self.name)

    def note_versions(self) -> None:
        """Remember the versions of the shards that are being gathered.

        A gathered parameter gets another version where its shard has: a backward that has saved the
        former values then raises, as in one process.
        """
        with as_local():
            before, self.versions = (
                self.versions,
                [version_of(each.sharded) for each in self.params],
            )
            if before and before != self.versions:
                each = zip(self.params, before, self.versions, strict=True)
                increment_version([param.gathered for param, old, new in each if old != new])

    def is_stale(self) -> bool:
        """Return whether the shards were changed since they were gathered."""
        if self.state is ShardedState.SHARDED and self.gather is None:
            return False
        with as_local():
            return self.versions != [version_of(each.sharded) for each in self.params]

    # ---- gradients

    def follow_requires_grad(self) -> None:
        """Let the gathered parameters require gradients exactly where the shards do."""
        trainable = []
        with as_local():
            for index, each in enumerate(self.params):
                wanted = _requires_grad(each.sharded)
                if wanted is not _requires_grad(each.gathered):
                    each.gathered.requires_grad_(wanted)
                if wanted:
                    trainable.append(index)
                    if index not in self.hooked:
                        self._hook(index)
        self.trainable = trainable

    def _hook(self, index: int) -> None:
        """Note when a parameter gets its gradient; call `on_grads_ready` when all have theirs."""
        self.hooked.add(index)
        unit = ref(self)  # a strong reference would be a cycle through C++, which is never freed

        def note_grad(_: torch.Tensor) -> None:
            found = unit()
            if found is not None:
                found.params_with_grad.add(index)
                if len(found.params_with_grad) == len(found.trainable):
                    found.on_grads_ready(found)

        gathered: Any = self.params[index].gathered
        gathered.register_post_accumulate_grad_hook(note_grad)

    def accumulate_grads(self) -> None:
        """Add gradients that are not reduced now to those of earlier backwards, in the dtype in
        which they will be reduced."""
        self.params_with_grad.clear()
        with torch.no_grad(), as_local():
            for index in self.trainable:
                each = self.params[index]
                if each.sum_dtype is None or each.sum_dtype is self.dtype:
                    continue  # autograd accumulates it
                gradient = get_grad(each.gathered)
                if gradient is not None:
                    if each.accumulated is None:
                        each.accumulated = gradient.to(each.sum_dtype)
                    else:
                        each.accumulated.add_(gradient)
                    set_grad(each.gathered, None)

    def reduction_of(self, param: ShardedParam) -> Reduction:
        """Return how the gradient of a parameter is reduced within autograd."""
        schedule, settings = self.groups[0].schedule, self.groups[0].settings
        assert schedule is not None, "its forward has set it"
        divisor = settings.divide_factor or self.info.size
        return Reduction(param, self.info, divisor, schedule.begin_graph_backward)

    def take_grads(self) -> list[torch.Tensor | None]:
        """Return the gradients of the trainable parameters, and remove them here."""
        self.params_with_grad.clear()
        result = []
        with torch.no_grad(), as_local():
            for index in self.trainable:
                each = self.params[index]
                gradient = get_grad(each.gathered)
                set_grad(each.gathered, None)
                if each.accumulated is not None:
                    if gradient is None:
                        gradient = each.accumulated
                    else:
                        gradient = each.accumulated.add_(gradient)
                    each.accumulated = None
                if gradient is not None and gradient.is_sparse:
                    gradient = gradient.to_dense()
                result.append(gradient)
        return result

    @property
    def has_grads(self) -> bool:
        """Whether it has gradients that are not reduced."""
        with as_local():
            return any(
                each.accumulated is not None or get_grad(each.gathered) is not None
                for each in self.params
            )

    def forget_grads(self) -> None:
        """Drop all gradients that have not reached the shards."""
        self.take_grads()
        for each in self.params:
            each.reduced = None

    def reduce_dtype_for(self, gradients: Sequence[torch.Tensor | None]) -> torch.dtype:
        """Return the dtype in which to reduce gradients of the trainable parameters. All ranks must
        find the same one: a rank without a gradient assumes the dtype of the gathered parameter."""
        found = set() if self.reduce_dtype is None else {self.reduce_dtype}
        for index, gradient in zip(self.trainable, gradients, strict=True):
            each = self.params[index]
            if each.sum_dtype is None:
                found.add(self.dtype if gradient is None else gradient.dtype)
            if each.reduced is not None:
                found.add(each.reduced.dtype)
        return promoted_dtype(found or {self.dtype})


def _address(shard: torch.Tensor) -> int:
    """Return where a shard is; an empty one, which has no address, by the identity of its storage.
    Within `as_local()`."""
    return shard.data_ptr() or storage_id(shard.untyped_storage())


# ---- causes of collectives, for listeners and for the errors of simulated ranks

_not_traced = nullcontext()


def trace_gather(units: Sequence[Unit]) -> AbstractContextManager[None]:
    """Attribute the collectives within to the gathering of these units' parameters."""
    if not _is_traced():
        return _not_traced
    schedule = units[0].groups[0].schedule
    is_backward = schedule is not None and schedule.in_backward
    return _trace("unshard", units, "backward" if is_backward else "forward")


def trace_reduction(units: Sequence[Unit]) -> AbstractContextManager[None]:
    """Attribute the collectives within to the reduction of these units' gradients."""
    if not _is_traced():
        return _not_traced
    return _trace("reduce_gradients", units, "backward")


def _is_traced() -> bool:
    return bool(trace.listeners) or world.current().is_simulated


def _trace(operator: str, units: Sequence[Unit], direction: str) -> trace_scope:
    names = dict.fromkeys(group.name for unit in units for group in unit.groups)
    return trace_scope(Cause(operator, ", ".join(names), direction))
