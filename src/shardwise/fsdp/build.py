"""Building units from groups, and the buckets of units that share a collective."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch

from shardwise.fsdp.all_gather import gather_buffer_size
from shardwise.fsdp.errors import ShardedState
from shardwise.fsdp.extended_unit import ExtendedUnit
from shardwise.fsdp.flat_buffer import BufferPool, BufferSize
from shardwise.fsdp.param_group import ParamGroup
from shardwise.fsdp.reduce_scatter import ReducePlan
from shardwise.fsdp.shard_memory import (
    UnitPart,
    adopt_params,
    check_tied_policies,
    divide_into_units,
    find_row,
)
from shardwise.fsdp.unit import Unit
from shardwise.torch_internals import as_local, own_parameters

BUCKET_BYTES = 2 << 20
"""Units share a collective up to this number of gathered bytes: the latency dominates below it."""


class Bucket:
    """Units that share a collective; they are neighbours in the order of units, and have equal
    dtypes and settings."""

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
    """Return the units of the parameters that groups have now."""
    adopt_params(groups)
    parts = divide_into_units(groups)
    check_tied_policies(parts)
    units = [_make_unit(number, part) for number, part in enumerate(parts)]
    made = {id(param.sharded): (unit, param) for unit in units for param in unit.params}
    for group in groups:
        found = [(slot, *made[id(slot.tensor)]) for slot in group.slots]
        group.bindings = [(slot, param) for slot, _, param in found]
        group.units = list(dict.fromkeys(unit for _, unit, _ in found))
        group.find_modules()
    return units


def _make_unit(number: int, part: UnitPart) -> Unit:
    kind = Unit if part.members[0][0].extension is None else ExtendedUnit
    unit = kind(number, part.groups, part.params, part.device, part.reduce_dtype)
    with torch.no_grad(), as_local():
        unit.find_shards()
        unit.use_row(find_row(part.groups, unit.params, unit.length))
    unit.make_gathered_params()
    return unit


# ---- buckets


def _make_buckets(units: Sequence[Unit], known: Sequence[Bucket]) -> list[Bucket]:
    """Return the buckets of units: small neighbouring units share a bucket.

    Arguments:
        known: earlier buckets, which are reused if they have the same units.
    """
    runs: list[list[Unit]] = []
    sizes: list[int] = []
    last_run: dict[Any, int] = {}  # of each kind of units
    for unit in units:
        size = unit.length * unit.dtype.itemsize * unit.info.shard_mesh_size
        kind = _kind_of(unit)
        run = last_run.get(kind)
        if run is not None and sizes[run] + size <= BUCKET_BYTES and _may_join(runs[run][-1], unit):
            runs[run].append(unit)
            sizes[run] += size
        else:
            last_run[kind] = len(runs)
            runs.append([unit])
            sizes.append(size)
    earlier = {tuple(bucket.units): bucket for bucket in known}
    return [earlier.get(tuple(run)) or Bucket(run) for run in runs]


def _kind_of(unit: Unit) -> Any:
    """Return what units must have in common to share a collective, apart from settings."""
    is_alone = isinstance(unit, ExtendedUnit) or unit.follows_grad_dtypes
    alone = unit.number if is_alone else None
    shards = unit.shard_dtype, unit.shard_device
    return (unit.info, shards, unit.dtype, unit.device, unit.reduce_dtype, alone)


def _may_join(before: Unit, unit: Unit) -> bool:
    """Return whether two neighbouring units may share a collective."""
    return (
        len(before.groups) == len(unit.groups) == 1
        and before.groups[0].root is unit.groups[0].root  # roots have separate backwards
        and not unit.groups[0].settings.needs_own_collectives
        and before.groups[0].settings.bucket_key == unit.groups[0].settings.bucket_key
    )
