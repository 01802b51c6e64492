"""All_gathers of a schedule: when a unit is gathered, and which unit is prefetched.

The order in which forward uses the units is recorded. While a group computes, its neighbour in the
last recorded order is gathered: in forward the unit after it, in backward the unit before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardwise.comm import communicator
from shardwise.fsdp.all_gather import CHANNEL, PostForwardGather, RowGather, post_forward_mesh
from shardwise.fsdp.build import UnitSet
from shardwise.fsdp.divergence import ScheduleGuard, check_peers_agree
from shardwise.fsdp.errors import ShardedState
from shardwise.fsdp.extended_unit import ExtendedGather, ExtendedUnit
from shardwise.fsdp.param_group import ParamGroup
from shardwise.fsdp.unit import Unit, trace_gather

_UNSHARDED = ShardedState.UNSHARDED


class UseOrder:
    """The order in which units are used.

    Arguments:
        units: all units.
        used_count: how many of them, from the first on, were used; all by default.
    """

    def __init__(self, units: Iterable[Unit], used_count: int | None = None) -> None:
        self._units = list(units)
        self._used_count = len(self._units) if used_count is None else used_count
        self._position = {unit: index for index, unit in enumerate(self._units)}

    def updated(self, used: dict[Unit, None]) -> UseOrder:
        """Return the order of units that were used now, followed by all others."""
        others = [unit for unit in self._units if unit not in used]
        return UseOrder([*used, *others], len(used))

    @property
    def last_used(self) -> Unit | None:
        """The unit that was used last; None if no module has parameters."""
        return self._units[self._used_count - 1] if self._used_count else None

    def neighbours(self, unit: Unit, step: int) -> Iterator[Unit]:
        """Return the units after one (`step` 1) or before it (`step` -1), the nearest first."""
        position = self._position.get(unit)
        while position is not None and 0 <= (position := position + step) < len(self._units):
            yield self._units[position]


class Prefetcher:
    """Starts the all_gathers of one schedule: of the units needed now, and of the next ones."""

    def __init__(self, unit_set: UnitSet) -> None:
        self._unit_set = unit_set
        self._begin_order = UseOrder([])
        """The order in which the last forward began with the modules that use the units."""
        self._end_order = UseOrder([])
        """The order in which it was done with them. Backward goes in the reverse of this order: a
        head in the group of the whole model comes first, then the layers, the last one first."""
        self._begun: dict[Unit, None] = {}
        """The units that the present forward has begun with, in order."""
        self._ended: dict[Unit, None] = {}
        """The units that it was done with, in order."""
        self._forward_guard: ScheduleGuard | None = None
        self._backward_guard: ScheduleGuard | None = None
        """Set from the start of a backward to its end."""
        self._gathered_in_backward: set[Unit] = set()
        """Units that were gathered at some time in this backward. When they are resharded depends
        on the gradients that this rank computes. So that all ranks gather alike, they are not
        gathered again, unless a module needs them."""

    def reset_order(self) -> None:
        """Use the order of the modules as the first guess, after the units were built anew."""
        self._begin_order = self._end_order = UseOrder(self._unit_set.units)

    # ---- forward and backward

    def begin_forward(self, guard: ScheduleGuard) -> None:
        """Begin an outermost forward."""
        self._begun, self._ended = {}, {}
        self._forward_guard = guard

    def prefetch_forward(self, group: ParamGroup) -> None:
        """Record that a group's forward has begun, and gather the next unit."""
        for unit in group.units:
            self._begun[unit] = None
        self._prefetch(group, group.forward_prefetch, self._begin_order, 1)

    def note_forward_done(self, group: ParamGroup) -> None:
        """Record that a group's forward is over. If a group runs several times, the last time
        counts, because backward begins with it."""
        for unit in group.units:
            self._ended.pop(unit, None)
            self._ended[unit] = None

    def end_forward(self) -> None:
        """End an outermost forward: drop prefetches that were not used, and keep the order."""
        self.drop_all()
        if self._forward_guard is not None:
            self._forward_guard.end()
            self._forward_guard = None
        if self._begun:
            self._begin_order = self._begin_order.updated(self._begun)
            self._end_order = self._end_order.updated(self._ended)

    def fail_forward(self) -> None:
        """Forget the sequence of gathers of a forward that has failed."""
        self._forward_guard = None

    def begin_backward(self, guard: ScheduleGuard) -> None:
        """Begin a backward."""
        self._backward_guard = guard
        self._gathered_in_backward.update(
            unit
            for unit in self._unit_set.units
            if unit.state is _UNSHARDED or unit.gather is not None
        )

    def prefetch_backward(self, group: ParamGroup) -> None:
        """Gather the unit that forward used before a group, whose backward has begun."""
        self._prefetch(group, group.backward_prefetch, self._end_order, -1)

    def end_backward(self) -> None:
        """End a backward: drop prefetches that were not used, and keep the sequence of gathers."""
        self.drop_all()
        if self._backward_guard is not None:
            self._backward_guard.end()

    def clear_backward(self) -> None:
        """Forget the backward that is over, or has failed."""
        self._backward_guard = None
        self._gathered_in_backward.clear()

    def is_used_last(self, group: ParamGroup) -> bool:
        """Return whether a group shares the bucket of the unit that the last forward used last."""
        bucket_of, last = self._unit_set.bucket_of, self._begin_order.last_used
        return last is not None and all(bucket_of[each] is bucket_of[last] for each in group.units)

    # ---- gathers

    def start(self, units: Iterable[Unit]) -> None:
        """Start the all_gathers of these units, unless they are gathered or under way.

        One all_gather also brings the neighbours of a unit in its bucket that are still sharded.
        """
        for unit in units:
            if unit.state is _UNSHARDED or unit.gather is not None or unit.is_alias:
                continue
            if unit.state is ShardedState.SHARDED_POST_FORWARD:
                mesh, _ = post_forward_mesh(unit, unit.post_forward_count)
                PostForwardGather(unit, communicator(mesh, (0,), channel=CHANNEL))
                continue
            bucket = self._unit_set.bucket_of[unit]
            run = bucket.units_to_gather(unit, self._gathered_in_backward)
            guard = self._forward_guard
            if self._backward_guard is not None:
                self._gathered_in_backward.update(run)
                guard = self._backward_guard
            if guard is not None and guard.differs(tuple(run)):
                with trace_gather(run):
                    check_peers_agree([unit.info.shard_communicator("")], run, "gathers")
            kind = ExtendedGather if isinstance(unit, ExtendedUnit) else RowGather
            kind(run, self._unit_set.pool, unit.groups[0].settings.all_gather)

    def finish(self, group: ParamGroup) -> None:
        """Wait for the gathers that a group needs."""
        for unit in group.units:
            unit.holders.add(group)
            if unit.gather is not None:
                unit.gather.fill(unit)
            elif unit.is_alias:
                unit.state = _UNSHARDED

    def _prefetch(
        self, group: ParamGroup, wanted: list[ParamGroup] | None, order: UseOrder, step: int
    ) -> None:
        if wanted is not None:
            for other in wanted:
                self.start(other.units)
            return
        if not group.units:
            return
        for unit in order.neighbours(group.units[-1 if step > 0 else 0], step):
            if unit.gather is not None:
                return  # one gather ahead is enough
            is_sharded = unit.state is not _UNSHARDED and not unit.is_alias
            if is_sharded and unit not in self._gathered_in_backward:
                if step > 0 or unit.groups[0].settings.unshard_in_backward:
                    self.start([unit])
                return

    def drop_all(self) -> None:
        """Wait for prefetches that were not used, and discard them. They must be over before the
        shards may change."""
        for unit in self._unit_set.units:
            if unit.gather is not None:
                unit.gather.drop(unit)
