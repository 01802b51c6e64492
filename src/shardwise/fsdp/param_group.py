"""Parameter groups: the modules of one call of `fully_shard`, and their parameters.

A group knows its slots, its units and its settings, and puts shards or gathered parameters into
its modules. The schedule (`shardwise.fsdp.schedule`) decides when.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch
from torch import nn

from shardwise.fsdp.config import GroupSettings, MixedPrecisionPolicy, OffloadPolicy
from shardwise.fsdp.errors import FSDPError, StateError, TrainingState
from shardwise.fsdp.mesh_info import DataParallelMeshInfo
from shardwise.fsdp.param import ParamSlot, ShardedParam
from shardwise.fsdp.unit import Unit
from shardwise.torch_internals import (
    as_local,
    next_sequence_number,
    sequence_number,
    storage_id,
)

if TYPE_CHECKING:
    from shardwise.fsdp.schedule import Schedule


class ForwardCall:
    """One forward of a group, which lives as long as its autograd graph."""

    __slots__ = ("__weakref__", "first_node", "grads_left", "input_count", "is_watched", "task")

    def __init__(self) -> None:
        self.first_node: int = next_sequence_number()
        """The sequence number of the first autograd node of this forward."""
        self.is_watched = False
        """Whether the group waits for the gradients of its inputs."""
        self.input_count = 0
        """The number of inputs that require gradients."""
        self.grads_left = 0
        """How many of them have no gradient yet in the present backward."""
        self.task = -1
        """The number of that backward."""

    def has_computed(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was computed since this forward began."""
        node = tensor.grad_fn
        return node is not None and sequence_number(node) >= self.first_node


class ParamGroup:
    """The modules of one call of `fully_shard`, and their parameters.

    Arguments:
        modules: the modules that compute with the parameters.
        slots: the places of the parameters, without those of submodules that have own groups.
        info: the data-parallel ranks.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        slots: list[ParamSlot],
        info: DataParallelMeshInfo,
        policy: MixedPrecisionPolicy,
        offload: OffloadPolicy,
        settings: GroupSettings,
    ) -> None:
        self.modules = modules
        self.slots = slots
        self.info = info
        self.policy = policy
        self.offload = offload
        self.settings = settings
        self.name = type(modules[0]).__name__
        self.forward_prefetch: list[ParamGroup] | None = None
        """Groups that users want gathered during its forward; None: those expected next."""
        self.backward_prefetch: list[ParamGroup] | None = None
        """The same for its backward."""
        self.schedule: Schedule | None = None
        self.outer: ParamGroup | None = None
        """The group of a module around these, if any."""
        self.is_manual = False
        """Of a root: whether users call `finalize_backward`."""
        self._reset()
        self._register_slots()

    def _reset(self) -> None:
        self.rows: list[torch.Tensor] = []
        """The memory of its shards (`shardwise.fsdp.shard_memory`)."""
        self.units: list[Unit] = []
        self.bindings: list[tuple[ParamSlot, ShardedParam]] = []
        """Each slot with its parameter."""
        self.own_modules: list[nn.Module] = []
        """Its modules and their submodules, without those of other groups."""
        self.state = TrainingState.IDLE
        self.active_forwards = 0
        """The number of its forwards under way: one may call another."""
        self.finished_modules: set[nn.Module] = set()
        """Its modules that have run in this forward of the outermost module."""
        self.open_calls: WeakSet[ForwardCall] = WeakSet()
        """Forwards that wait for gradients of their inputs."""
        self.iteration_is_manual: bool | None = None
        """Of a root: the value of `is_manual` when the present backward began; None outside."""
        self.has_gathered = False
        """Whether the modules hold the gathered parameters."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamGroup:
        """Return the group of copied modules; its units are built when they first run."""
        result = copy.copy(self)
        memo[id(self)] = result
        result._reset()
        result.schedule = result.outer = None
        result.slots = []
        result.modules = copy.deepcopy(self.modules, memo)
        result.slots = [
            slot.for_copy(copy.deepcopy(slot.module, memo), copy.deepcopy(slot.tie, memo))
            for slot in self.slots
        ]
        result._register_slots()
        result.forward_prefetch = result.backward_prefetch = None
        return result

    # torch's names: a group is both the state of a module and its group of parameters.

    @property
    def _fsdp_param_groups(self) -> list[ParamGroup]:
        return [self] if self.slots else []

    @property
    def _fsdp_param_group(self) -> ParamGroup | None:
        return self if self.slots else None

    @property
    def _training_state(self) -> TrainingState:
        return self.state

    @property
    def mesh_info(self) -> DataParallelMeshInfo:
        """The data-parallel ranks; single parameters may have others."""
        return self.info

    @property
    def fsdp_params(self) -> list[ShardedParam]:
        """Its parameters, in all their forms; empty before the first forward."""
        return list(dict.fromkeys(param for _, param in self.bindings))

    @property
    def root(self) -> ParamGroup:
        """The group of the outermost module around these."""
        found, seen = self, {self}
        while found.outer is not None and found.outer not in seen:
            found = found.outer
            seen.add(found)
        return found

    def lock_manual_mode(self) -> None:
        """Fix the finalization mode of its root, as its backward has begun."""
        root = self.root
        if root.iteration_is_manual is None:
            root.iteration_is_manual = root.is_manual

    def not_root_error(self, method: str) -> StateError:
        """Return the error for a method that is for the root only."""
        return StateError(
            f"{method}: {self.name} is within {self.root.name}, the root; call it on that module"
        )

    @property
    def is_alias(self) -> bool:
        """Whether it computes with the shards themselves, because each is the whole parameter."""
        return all(unit.is_alias for unit in self.units)

    def change_settings(self, **settings: Any) -> None:
        """Change some settings."""
        self.settings = replace(self.settings, **settings)
        if self.schedule is not None:
            self.schedule.settings_changed = True

    # ---- parameters and modules

    def _register_slots(self) -> None:
        """Let other groups with the same parameters find this one."""
        for slot in self.slots:
            slot.group = ref(self)
            slot.tie.add(slot)

    def find_tied_groups(self) -> list[ParamGroup]:
        """Return the groups that have any of its parameters: this one and others, in the order of
        their creation."""
        found: dict[ParamGroup, None] = {}
        for slot in self.slots:
            for other in slot.tie.slots():
                group = None if other.group is None else other.group()
                if group is not None:
                    found[group] = None
        return list(found) or [self]

    def forget_empty_rows(self) -> None:
        """Free the rows that hold none of its shards any more."""
        with as_local():
            used = {
                storage_id(slot.tensor.untyped_storage()) for slot in self.slots if slot.is_filled
            }
            self.rows = [row for row in self.rows if storage_id(row.untyped_storage()) in used]

    def find_modules(self) -> None:
        """Collect the modules that compute with its parameters."""
        self.own_modules = []
        left = list(self.modules)
        while left:
            module = left.pop()
            if module not in self.own_modules:
                self.own_modules.append(module)
                left += [each for each in module.children() if not hasattr(each, "_fsdp_group")]

    def put_gathered(self) -> None:
        """Put the gathered parameters into the modules."""
        if not self.has_gathered:
            self.has_gathered = True
            for slot, param in self.bindings:
                slot.put(param.gathered)

    def put_shards(self) -> None:
        """Put the shards into the modules, except where users have put another parameter since."""
        if self.has_gathered:
            self.has_gathered = False
            for slot, param in self.bindings:
                if slot.holds(param.gathered):
                    slot.put(param.sharded)

    @contextmanager
    def with_shards(self) -> Iterator[None]:
        """Let the modules hold the shards for a while."""
        had_gathered = self.has_gathered
        self.put_shards()
        try:
            yield
        finally:
            if had_gathered:
                self.put_gathered()

    def reshard(self) -> None:
        """Free the gathered parameters, on a user's request."""
        if self.state is not TrainingState.IDLE:
            raise StateError(
                f"reshard: {self.name} is in {self.state.name} and computes with its parameters; "
                "call it outside of forward and backward"
            )
        for unit in self.units:
            if unit.gather is not None:
                unit.gather.drop(unit)
            unit.reshard()
        self.put_shards()

    # ---- dtypes of gradients that users have set

    def note_grad_dtypes(self) -> None:
        """Remember the `grad_dtype` that users have set on parameters."""
        for slot in self.slots:
            slot.note_grad_dtype()

    @contextmanager
    def preserve_grad_dtypes(self) -> Iterator[None]:
        """While parameters are converted, keep the dtype of gradients whose `grad_dtype` was set;
        these gradients still follow their parameters to another device."""
        self.note_grad_dtypes()
        kept: list[tuple[ParamSlot, torch.Tensor]] = []
        for slot in self.slots:
            if slot.grad_dtype is not None and slot.is_filled and slot.tensor.grad is not None:
                kept.append((slot, slot.tensor.grad))
                slot.tensor.grad = None
        try:
            yield
        finally:
            for slot in self.slots:
                slot.restore_grad_dtype()
            for slot, gradient in kept:
                slot.tensor.grad = gradient.to(slot.tensor.device)


# ---- torch's names for it


def module_state(module: nn.Module) -> ParamGroup | None:
    """Return the group of a module; None if it is not sharded. It is torch's
    `_get_module_fsdp_state`, and `fully_shard.state`."""
    found = getattr(module, "_fsdp_group", None)
    return found if isinstance(found, ParamGroup) else None


# ---- checks of arguments


def check_modules(modules: Any) -> None:
    """Raise `FSDPError` unless the argument `modules` is a list of modules."""
    if isinstance(modules, nn.Module) or not isinstance(modules, Iterable):
        raise FSDPError(f"modules: expected a list of modules, got {type(modules).__name__}")


def group_of(module: Any, argument: str) -> ParamGroup:
    """Return the group of a sharded module, or raise `FSDPError` that names the argument."""
    group = getattr(module, "_fsdp_group", None)
    if not isinstance(group, ParamGroup):
        raise FSDPError(
            f"{argument}: expected a module that fully_shard or replicate was called on, got "
            f"{type(module).__name__}"
        )
    return group
