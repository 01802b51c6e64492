"""Building units from groups, their flat buffers, and the buckets that share a collective."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import nn

from shardwise.dtensor.tensor import DTensor, as_layout
from shardwise.fsdp.all_gather import gather_buffer_size
from shardwise.fsdp.config import CPUOffloadPolicy
from shardwise.fsdp.errors import FSDPError, ShardedState, StateError
from shardwise.fsdp.extended_unit import ExtendedUnit
from shardwise.fsdp.flat_buffer import BufferPool, BufferSize
from shardwise.fsdp.param import ParamSlot, ShardedParam, accumulation_dtype, promoted_dtype
from shardwise.fsdp.param_group import ParamGroup
from shardwise.fsdp.reduce_scatter import ReducePlan
from shardwise.fsdp.unit import Unit
from shardwise.torch_internals import as_local, own_parameters

BUCKET_BYTES = 2 << 20
"""Units share a collective up to this number of gathered bytes: the latency dominates below it."""
REPLICATED_UNIT_BYTES = 4 << 20
"""A replicated module is reduced in units of about this number of bytes, each as soon as its
gradients are computed."""

SlotTensor = tuple[ParamSlot, DTensor]
"""A parameter and the first slot that holds it."""


class Bucket:
    """Units that share a collective; they are consecutive in a flat buffer and have equal
    settings."""

    def __init__(self, units: list[Unit]) -> None:
        self.units = units
        self._plans: dict[Any, ReducePlan] = {}

    def buffer_sizes(self) -> list[BufferSize]:
        """Return the sizes of the row buffers that it needs."""
        is_direct = len(self.units) == 1 and bool(self.units[0].direct_params)
        return [gather_buffer_size(self.units, is_direct), self.plan(self.units).size]

    def plan(self, units: Sequence[Unit]) -> ReducePlan:
        """Return the plan to reduce the gradients of some of its units."""
        is_direct = units[0].groups[0].settings.reduce_scatter is None
        key = (is_direct, *((unit.number, *unit.trainable) for unit in units))
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = ReducePlan(units, is_direct)
        return found

    def units_to_gather(self, unit: Unit, excluded: Set[Unit]) -> list[Unit]:
        """Return the consecutive units around `unit` that are not gathered yet.

        Arguments:
            excluded: units that are not gathered together with it.
        """
        first = last = self.units.index(unit)
        while first > 0 and _is_to_gather(self.units[first - 1], excluded):
            first -= 1
        while last + 1 < len(self.units) and _is_to_gather(self.units[last + 1], excluded):
            last += 1
        return self.units[first : last + 1]


def _is_to_gather(unit: Unit, excluded: Set[Unit]) -> bool:
    is_sharded = unit.state is ShardedState.SHARDED and not unit.is_alias
    return is_sharded and unit.gather is None and unit not in excluded


class UnitSet:
    """The units of the groups of a schedule, with their buckets and row buffers."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self.groups = groups
        self.units: list[Unit] = []
        self.pool = BufferPool()
        self._buckets: list[Bucket] = []
        self.bucket_of: dict[Unit, Bucket] = {}

    def is_current(self) -> bool:
        """Return whether the units have the parameters that the modules have now."""
        if not self.units:
            return False
        for group in self.groups:
            for slot, param in group.bindings:
                found: Any = own_parameters(slot.module).get(slot.key)
                if found is not param.sharded and found is not param.gathered:
                    return False
        with as_local():
            return all(unit.has_shards_in_place() for unit in self.units)

    def build(self) -> None:
        """Build the units from the parameters that the modules have now."""
        self.units = _build_units(self.groups)
        self._buckets, self.bucket_of = [], {}
        self.pool.clear()

    def make_buckets(self) -> None:
        """Divide the units into buckets, by the present settings of their groups."""
        self._buckets = _make_buckets(self.units, self._buckets)
        self.bucket_of = {unit: bucket for bucket in self._buckets for unit in bucket.units}
        self.pool.expect(size for bucket in self._buckets for size in bucket.buffer_sizes())


# ---- units


def _build_units(groups: Sequence[ParamGroup]) -> list[Unit]:
    """Return the units of groups, with their memory, in the order of the groups.

    Tied parameters that several groups share have units of their own, and so do parameters with
    gather extensions.
    """
    tensors: dict[int, tuple[ParamSlot, DTensor, list[ParamGroup]]] = {}
    for group in groups:
        for slot in group.slots:
            tensor = _current_tensor(slot)
            users = tensors.setdefault(id(tensor), (slot, tensor, []))[2]
            if group not in users:
                users.append(group)
    by_unit: dict[Any, list[SlotTensor]] = {}
    by_dtype: dict[Any, list[SlotTensor]] = {}
    for slot, tensor, users in tensors.values():
        is_extended = slot.extension is not None
        dtype_key: Any = (tuple(map(id, users)), tensor.dtype)
        unit_key: Any = (dtype_key, slot.policy.param_dtype, tensor.device, is_extended)
        by_unit.setdefault(unit_key, []).append((slot, tensor))
        by_dtype.setdefault(dtype_key, []).append((slot, tensor))
    units: list[Unit] = []
    made: dict[int, tuple[Unit, ShardedParam]] = {}
    for (dtype_key, *_), members in by_unit.items():
        users = tensors[id(members[0][1])][2]
        _check_tied_policies(members, users)
        reduce_dtype = _find_reduce_dtype(by_dtype[dtype_key])
        for part in _split_replicated(members, users[0]):
            unit = _make_unit(len(units), users, part, reduce_dtype)
            units.append(unit)
            made.update((id(param.sharded), (unit, param)) for param in unit.params)
    _make_flat_buffers(units)
    for group in groups:
        found = [(slot, *made[id(slot.tensor)]) for slot in group.slots]
        group.bindings = [(slot, param) for slot, _, param in found]
        group.units = list(dict.fromkeys(unit for _, unit, _ in found))
        group.find_modules()
    return units


def _check_tied_policies(part: Sequence[SlotTensor], users: Sequence[ParamGroup]) -> None:
    """Raise `FSDPError` if groups share a parameter and have different dtypes for it."""
    if len(users) == 1:
        return
    first = {id(tensor): slot for slot, tensor in part}
    for other in users[1:]:
        for slot in other.slots:
            before = first.get(id(slot.tensor))
            if before is None:
                continue
            for field in ("param_dtype", "reduce_dtype"):
                wanted = [getattr(each.policy, field) for each in (before, slot)]
                if wanted[0] != wanted[1]:
                    raise FSDPError(
                        f"mp_policy: {before.name} is shared by {users[0].name} and {other.name}, "
                        f"with {field} {wanted[0]} and {wanted[1]}; modules with tied parameters "
                        "need the same"
                    )


def _find_reduce_dtype(parameters: Sequence[SlotTensor]) -> torch.dtype | None:
    """Return the dtype to which all `grad_dtype`s of the parameters promote, in which gradients are
    reduced. None if every parameter accepts gradients of any dtype."""
    found = {accumulation_dtype(slot, tensor.dtype) for slot, tensor in parameters}
    known = {dtype for dtype in found if dtype is not None}
    return promoted_dtype(known) if known else None


def _current_tensor(slot: ParamSlot) -> DTensor:
    """Return the parameter in a slot, with the slot's layout. Users may have replaced it."""
    tensor = slot.tensor
    if tensor.is_meta:
        raise StateError(
            f"{slot.name}: it is on the meta device and has no values; call "
            "module.to_empty(device=...) and initialise it, or load a state dict, before forward"
        )
    if not isinstance(tensor, nn.Parameter):
        raise StateError(
            f"{slot.name}: expected a parameter, got a {type(tensor).__name__} that is none, which "
            "would get no gradient; torch.func.functional_call cannot put tensors into a sharded "
            "module: change the parameters, or assign an nn.Parameter"
        )
    slot.note_grad_dtype()
    if isinstance(tensor, DTensor) and tensor._layout is slot.layout:
        slot.restore_grad_dtype()
        return tensor
    shard = as_layout(tensor.detach(), slot.layout, slot.name)
    result: Any = nn.Parameter(shard, tensor.requires_grad)
    slot.put(result)
    slot.restore_grad_dtype()
    return result  # type: ignore[no-any-return]


def _split_replicated(part: list[SlotTensor], group: ParamGroup) -> list[list[SlotTensor]]:
    """Split the parameters of a replicated module over several units, others over one."""
    if group.info.shard_mesh_size > 1:
        return [part]
    result: list[list[SlotTensor]] = [[]]
    size = 0
    for slot, tensor in part:
        if size >= REPLICATED_UNIT_BYTES:
            result.append([])
            size = 0
        result[-1].append((slot, tensor))
        size += tensor.nbytes
    return result


def _make_unit(
    number: int,
    groups: list[ParamGroup],
    part: list[SlotTensor],
    reduce_dtype: torch.dtype | None,
) -> Unit:
    group = groups[0]
    params = [ShardedParam(slot, tensor, group.info) for slot, tensor in part]
    device = part[0][1].device
    if isinstance(group.offload, CPUOffloadPolicy):
        device = torch.device(group.info.mesh.device_type)
    kind = Unit if part[0][0].extension is None else ExtendedUnit
    return kind(number, groups, params, device, reduce_dtype)


def _make_flat_buffers(units: Sequence[Unit]) -> None:
    """Move the shards of units that may share a collective into one flat buffer.

    The units are in the order in which forward probably uses them, so that an all_gather of
    consecutive units sends a range of the buffer without a copy.
    """
    together: dict[Any, list[Unit]] = {}
    for unit in units:
        first = unit.params[0].sharded
        offload = unit.groups[0].offload
        pinned = (
            isinstance(offload, CPUOffloadPolicy)
            and offload.pin_memory
            and torch.accelerator.is_available()
        )
        is_alone = isinstance(unit, ExtendedUnit) or unit.follows_grad_dtypes
        alone = unit.number if is_alone else None
        key = (unit.info, first.dtype, unit.dtype, unit.reduce_dtype, first.device, alone, pinned)
        together.setdefault(key, []).append(unit)
    for (*_, pinned), some in together.items():
        first = some[0].params[0].sharded
        total = sum(unit.length for unit in some)
        with torch.no_grad(), as_local():
            flat = torch.zeros(total, dtype=first.dtype, device=first.device, pin_memory=pinned)
            start = 0
            for unit in some:
                unit.place_shards(flat, start)
                start += unit.length
        for unit in some:
            unit.make_gathered_params()


# ---- buckets


def _make_buckets(units: Sequence[Unit], known: Sequence[Bucket]) -> list[Bucket]:
    """Return the buckets of units: small neighbouring units share a bucket.

    Arguments:
        known: earlier buckets, which are reused if they have the same units.
    """
    runs: list[list[Unit]] = []
    sizes: list[int] = []
    last_run: dict[int, int] = {}  # of each flat buffer
    for unit in units:
        size = unit.length * unit.dtype.itemsize * unit.info.shard_mesh_size
        run = last_run.get(id(unit.flat))
        if run is not None and sizes[run] + size <= BUCKET_BYTES and _may_join(runs[run][-1], unit):
            runs[run].append(unit)
            sizes[run] += size
        else:
            last_run[id(unit.flat)] = len(runs)
            runs.append([unit])
            sizes.append(size)
    earlier = {tuple(bucket.units): bucket for bucket in known}
    return [earlier.get(tuple(run)) or Bucket(run) for run in runs]


def _may_join(before: Unit, unit: Unit) -> bool:
    """Return whether two neighbouring units may share a collective."""
    return (
        len(before.groups) == len(unit.groups) == 1
        and before.groups[0].root is unit.groups[0].root  # roots have separate backwards
        and not unit.groups[0].settings.needs_own_collectives
        and before.groups[0].settings.bucket_key == unit.groups[0].settings.bucket_key
    )
