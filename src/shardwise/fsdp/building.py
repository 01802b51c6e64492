"""From groups to units, flat buffers and buckets: what is gathered and reduced at once."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import nn

from shardwise.fsdp.arena import Arena
from shardwise.fsdp.division import Division
from shardwise.fsdp.errors import FSDPError, StateError
from shardwise.fsdp.extended import ExtendedUnit
from shardwise.fsdp.gathering import gathered_size
from shardwise.fsdp.grad_dtype import promoted
from shardwise.fsdp.group import Group
from shardwise.fsdp.held import Held
from shardwise.fsdp.policies import CPUOffloadPolicy
from shardwise.fsdp.pool import Size
from shardwise.fsdp.reducing import Plan
from shardwise.fsdp.settings import Settings
from shardwise.fsdp.slot import Slot
from shardwise.fsdp.states import ShardedState
from shardwise.fsdp.unit import Unit
from shardwise.tensor import DTensor, laid_out

COALESCED = 2 << 20
"""Units travel together up to so many gathered bytes: below, a collective costs its latency."""
REPLICATED = 4 << 20
"""A module that is not sharded is reduced in units of about so many bytes, each as soon as its
gradients are there."""


class Bucket:
    """Units that travel together: consecutive in an arena, of groups with equal settings."""

    def __init__(self, units: list[Unit]) -> None:
        self.units = units
        self._plans: dict[Any, Plan] = {}

    def sizes(self) -> list[Size]:
        """Of the buffers that it needs."""
        is_direct = len(self.units) == 1 and bool(self.units[0].direct)
        return [gathered_size(self.units, is_direct), self.plan(self.units).size]

    def plan(self, units: Sequence[Unit]) -> Plan:
        """Where the gradients of all its units, or of one, lie when they are reduced."""
        is_direct = units[0].groups[0].settings.reduce_scatter is None
        key = (is_direct, *((unit.number, *unit.trainable) for unit in units))
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = Plan(units, is_direct)
        return found

    def run_around(self, unit: Unit, without: Set[Unit]) -> list[Unit]:
        """The consecutive units with this one among them that are yet to be gathered.

        Arguments:
            without: those that do not join it.
        """
        at = first = last = self.units.index(unit)
        while first > 0 and _is_to_gather(self.units[first - 1], without):
            first -= 1
        while last + 1 < len(self.units) and _is_to_gather(self.units[last + 1], without):
            last += 1
        assert first <= at <= last, "it is in its own run"
        return self.units[first : last + 1]


def _is_to_gather(unit: Unit, without: Set[Unit]) -> bool:
    is_here = unit.gather is not None or unit.is_alias or unit in without
    return unit.state is ShardedState.SHARDED and not is_here


def built(groups: Sequence[Group]) -> list[Unit]:
    """The units of groups, with their memory, in the order of the groups.

    Parameters that several groups have, being tied, are units of their own, and so are those with
    extensions.
    """
    tensors: dict[int, tuple[Slot, DTensor, list[Group]]] = {}
    for group in groups:
        for slot in group.slots:
            tensor = _current(slot)
            users = tensors.setdefault(id(tensor), (slot, tensor, []))[2]
            if group not in users:
                users.append(group)
    parts: dict[Any, list[tuple[Slot, DTensor]]] = {}
    alike: dict[Any, list[tuple[Slot, DTensor]]] = {}
    for slot, tensor, users in tensors.values():
        is_extended = slot.extension is not None
        param_dtype = slot.policy.param_dtype
        group_key: Any = (tuple(map(id, users)), tensor.dtype)
        key: Any = (group_key, param_dtype, tensor.device, is_extended)
        parts.setdefault(key, []).append((slot, tensor))
        alike.setdefault(group_key, []).append((slot, tensor))
    units: list[Unit] = []
    made: dict[int, tuple[Unit, Held]] = {}
    users_of = {id(tensor): users for _, tensor, users in tensors.values()}
    for (group_key, *_), part in parts.items():
        users = users_of[id(part[0][1])]
        _check_tied(part, users)
        reduce_dtype = _reduce_dtype(alike[group_key])
        for some in _split(part, users[0]):
            unit = _unit(len(units), users, some, reduce_dtype)
            units.append(unit)
            made.update((id(held.sharded), (unit, held)) for held in unit.held)
    _lay_out(units)
    for group in groups:
        found = [(slot, *made[id(slot.tensor)]) for slot in group.slots]
        group.bindings = [(slot, held) for slot, _, held in found]
        group.units = list(dict.fromkeys(unit for _, unit, _ in found))
        group.find_modules()
    return units


def _check_tied(part: Sequence[tuple[Slot, DTensor]], users: Sequence[Group]) -> None:
    """Refuse groups that share a parameter and want to compute with it in different ways."""
    if len(users) == 1:
        return
    first = {id(tensor): slot for slot, tensor in part}
    for other in users[1:]:
        for slot in other.slots:
            before = first.get(id(slot.tensor))
            if before is None:
                continue
            for what in ("param_dtype", "reduce_dtype"):
                wanted = [getattr(each.policy, what) for each in (before, slot)]
                if wanted[0] != wanted[1]:
                    raise FSDPError(
                        f"mp_policy: {before.name} is shared by {users[0].name} and {other.name}, "
                        f"with {what} {wanted[0]} and {wanted[1]}; modules with tied parameters "
                        "need the same"
                    )


def _reduce_dtype(parameters: Sequence[tuple[Slot, DTensor]]) -> torch.dtype | None:
    """What gradients of parameters of one group, and of one dtype, are reduced in: all in the dtype
    that holds the values of each. None if all may have any."""
    found = {
        Held.sum_dtype_of(tensor.dtype, slot.grad_dtype, slot.policy.reduce_dtype)
        for slot, tensor in parameters
    }
    known = {dtype for dtype in found if dtype is not None}
    return promoted(known) if known else None


def _current(slot: Slot) -> DTensor:
    """The parameter in a slot, as it should lie; users may have put another one there."""
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
    piece = laid_out(tensor.detach(), slot.layout, slot.name)
    result: Any = nn.Parameter(piece, tensor.requires_grad)
    slot.put(result)
    slot.restore_grad_dtype()
    return result  # type: ignore[no-any-return]


def _split(part: list[tuple[Slot, DTensor]], group: Group) -> list[list[tuple[Slot, DTensor]]]:
    """Parameters of one unit, or of several if they need no gathering."""
    if group.info.shard_mesh_size > 1:
        return [part]
    result: list[list[tuple[Slot, DTensor]]] = [[]]
    size = 0
    for slot, tensor in part:
        if size >= REPLICATED:
            result.append([])
            size = 0
        result[-1].append((slot, tensor))
        size += tensor.nbytes
    return result


def _unit(
    number: int,
    groups: list[Group],
    part: list[tuple[Slot, DTensor]],
    reduce_dtype: torch.dtype | None,
) -> Unit:
    group, policy = groups[0], part[0][0].policy
    held = [
        Held(
            slot.name,
            tensor,
            Division.of(tensor._layout, group.info, slot.strides is None),
            slot.strides,
            slot.grad_dtype,
            slot.policy.reduce_dtype,
        )
        for slot, tensor in part
    ]
    device = part[0][1].device
    if isinstance(group.offload, CPUOffloadPolicy):
        device = torch.device(group.info.mesh.device_type)
    extensions = [slot.extension for slot, _ in part if slot.extension is not None]
    if extensions:
        modules = [slot.module for slot, _ in part]
        return ExtendedUnit(
            number, groups, held, group.info, policy, device, reduce_dtype, extensions, modules
        )
    return Unit(number, groups, held, group.info, policy, device, reduce_dtype)


def _lay_out(units: Sequence[Unit]) -> None:
    """Put the shards of units that may travel together into one flat buffer."""
    arenas: dict[Any, list[Unit]] = {}
    for unit in units:
        first = unit.held[0].sharded
        offload = unit.groups[0].offload
        pinned = (
            isinstance(offload, CPUOffloadPolicy)
            and offload.pin_memory
            and torch.accelerator.is_available()
        )
        is_alone = isinstance(unit, ExtendedUnit) or unit.follows_gradients
        alone = unit.number if is_alone else None
        key = (unit.info, first.dtype, unit.dtype, unit.reduce_dtype, first.device, alone, pinned)
        arenas.setdefault(key, []).append(unit)
    for (*_, pinned), some in arenas.items():
        Arena(some, pinned)
        for unit in some:
            unit.make_wholes()


def buckets_of(units: Sequence[Unit], known: Sequence[Bucket]) -> list[Bucket]:
    """Units that travel together, small ones with their neighbours.

    Arguments:
        known: earlier ones, which are used again where they fit.
    """
    runs: list[list[Unit]] = []
    sizes: list[int] = []
    last: dict[int, int] = {}
    for unit in units:
        size = unit.length * unit.dtype.itemsize * unit.info.shard_mesh_size
        at = last.get(id(unit.arena))
        if at is not None and sizes[at] + size <= COALESCED and _may_join(runs[at][-1], unit):
            runs[at].append(unit)
            sizes[at] += size
        else:
            last[id(unit.arena)] = len(runs)
            runs.append([unit])
            sizes.append(size)
    earlier = {tuple(bucket.units): bucket for bucket in known}
    result = [earlier.get(tuple(run)) or Bucket(run) for run in runs]
    for bucket in result:
        for unit in bucket.units:
            unit.bucket = bucket
    return result


def _may_join(before: Unit, unit: Unit) -> bool:
    return (
        len(before.groups) == len(unit.groups) == 1
        and before.groups[0].root is unit.groups[0].root  # whose backwards are two
        and not unit.groups[0].settings.travels_alone
        and _about_travel(before.groups[0].settings) == _about_travel(unit.groups[0].settings)
    )


def _about_travel(settings: Settings) -> tuple[Any, ...]:
    return (
        settings.gradient_sync,
        settings.all_reduce,
        settings.divide_factor,
        settings.fill_unused,
        settings.travels_alone,
        settings.unshard_in_backward,
    )
