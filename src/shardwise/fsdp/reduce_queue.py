"""The queue of gradient reductions: which gradients are reduced together, in which order, and when.

Reductions start in the reverse of the order in which forward used the units, even if this rank
computes the gradients in another order. So all ranks start them in the same order, though not at
the same time.

    waiting ----------> in flight -----------------> done
            all grads             two later ones      (the shards have
            of its units          have started, or    their gradients)
            are computed,         backward ends
            and it is first
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from weakref import WeakValueDictionary

from shardwise.fsdp.build import UnitSet
from shardwise.fsdp.divergence import ScheduleGuard, check_peers_agree
from shardwise.fsdp.reduce_scatter import GradReduction
from shardwise.fsdp.unit import Unit, trace_reduction


class _GraphTask:
    """One backward of autograd, which may go through models that have a queue each.

    The queues share communication channels, and the time at which gradients are computed differs
    between ranks. So on every rank a queue starts nothing before the queues that began earlier are
    empty.
    """

    def __init__(self) -> None:
        self.queues: list[ReduceQueue] = []

    def start_ready(self) -> None:
        """Start the reductions that are next and ready."""
        for queue in self.queues:
            if not queue.start_ready():
                return

    def start_all(self) -> None:
        """Start all reductions, at the end of backward: no more gradients will be computed."""
        for queue in self.queues:
            queue.start_all()


_graph_tasks: WeakValueDictionary[int, _GraphTask] = WeakValueDictionary()
"""The backwards under way, by their number in autograd."""


class ReduceQueue:
    """The reductions of one schedule: those that wait for gradients, and those in flight."""

    def __init__(self, unit_set: UnitSet) -> None:
        self._unit_set = unit_set
        self.used: dict[Unit, None] = {}
        """The units whose gradients are expected, in the order in which forward used them."""
        self.ready: set[Unit] = set()
        """Units for which this backward has computed all gradients."""
        self._owed: dict[Unit, None] = {}
        """Units with gradients of earlier backwards, which were not reduced."""
        self._waiting: list[GradReduction] = []
        """Reductions that have not started, in the order in which they will."""
        self._reduction_of: dict[Unit, GradReduction] = {}
        self._in_flight: deque[GradReduction] = deque()
        self._guard = ScheduleGuard()
        self.max_input_buffers = 1
        """How many reductions may be in flight while the next one is collected."""
        self._graph_task = _GraphTask()
        self._makes_graph = False
        """Whether the gradients of the present backward get a history."""

    # ---- backward

    def begin(self, task: int, guard: ScheduleGuard, makes_graph: bool) -> None:
        """Begin a backward: enqueue the reductions that are expected.

        Arguments:
            task: the number of the backward in autograd.
            makes_graph: whether gradients get a history (`create_graph=True`).
        """
        self._guard = guard
        self._makes_graph = makes_graph
        self._graph_task = _graph_tasks.setdefault(task, _GraphTask())
        self._graph_task.queues.append(self)
        for unit in (*reversed(self.used), *self._owed):
            self.expect(unit)

    def expect(self, unit: Unit) -> None:
        """Enqueue the reduction of a unit and of its bucket, unless it is enqueued."""
        if unit not in self._reduction_of and unit.trainable:
            self._enqueue(unit)

    def _enqueue(self, unit: Unit) -> None:
        if not _is_synchronized(unit):
            return
        if unit in self.used and unit not in self._reduction_of:
            reduction = self._make_reduction(unit, self._unit_set.bucket_of[unit].units)
            # Other units of the bucket that were not used will not have gradients.
            reduction.waits_for &= self.used.keys()
        else:
            reduction = self._make_reduction(unit, [unit])
        self._waiting.append(reduction)
        for each in reduction.waits_for:
            self._reduction_of[each] = reduction

    def _make_reduction(self, unit: Unit, units: list[Unit]) -> GradReduction:
        plan = self._unit_set.bucket_of[unit].plan(units)
        pool = self._unit_set.pool
        return GradReduction(plan, unit.groups[0].settings, pool, self._makes_graph)

    def put(self, unit: Unit) -> None:
        """Take the gradients of a unit, which are all computed, and start reductions that are
        ready."""
        self.ready.add(unit)
        reduction = self._reduction_of.get(unit)
        if reduction is None or reduction not in self._waiting:
            if not _is_synchronized(unit):
                unit.accumulate_grads()
                return
            self._enqueue(unit)  # a second backward of the unit, or one that was not expected
            reduction = self._reduction_of[unit]
        reduction.put(unit)
        self._graph_task.start_ready()

    def start_ready(self) -> bool:
        """Start the reductions that are next and ready; return whether none is left."""
        while self._waiting and not self._waiting[0].waits_for:
            self._start(self._waiting.pop(0))
        return not self._waiting

    def start_all(self) -> None:
        """Start all reductions that are left, without the gradients that were not computed."""
        while self._waiting:
            self._start(self._waiting.pop(0))

    def _start(self, reduction: GradReduction) -> None:
        units = reduction.plan.units
        if self._guard.differs(tuple(units)):
            with trace_reduction(units):
                check_peers_agree(reduction.info.communicators(), units, "reduces the gradients of")
        reduction.start()
        self._in_flight.append(reduction)
        # The reduce_scatters of earlier ones had the backward of a layer or more to finish.
        for earlier in list(self._in_flight)[: -self.max_input_buffers]:
            earlier.start_all_reduce()
        while len(self._in_flight) > self.max_input_buffers + 1:
            self._in_flight.popleft().finish()

    def end(self, is_awaited: Callable[[Unit], bool]) -> None:
        """End a backward: start all reductions that are left.

        Arguments:
            is_awaited: whether to wait until the shards of a unit have their gradients.
        """
        for unit in self._unit_set.units:
            if unit.params_with_grad and self._reduction_of.get(unit) not in self._waiting:
                self._enqueue(unit)  # it has some gradients only, or has got some a second time
                if unit not in self._reduction_of:
                    unit.accumulate_grads()
        candidates = (*self._owed, *self.used)
        self._owed = {unit: None for unit in candidates if unit not in self._reduction_of}
        self._graph_task.start_all()
        self._guard.end()
        self.finish(is_awaited)

    def finish(self, is_awaited: Callable[[Unit], bool] = lambda unit: True) -> None:
        """Wait for reductions in flight, and give the shards their gradients.

        Arguments:
            is_awaited: whether to wait for those of a unit.
        """
        awaited = [each for each in self._in_flight if any(map(is_awaited, each.plan.units))]
        for reduction in awaited:
            reduction.start_all_reduce()
        for reduction in awaited:
            self._in_flight.remove(reduction)
            reduction.finish()

    # ---- gradients of earlier backwards

    def reduce_owed(self, units: Iterable[Unit], guard: ScheduleGuard) -> None:
        """Start the reductions that earlier backwards of these units have left out. Called outside
        of backward."""
        self._guard = guard
        owed = self.find_owed(units)
        bucket_of = self._unit_set.bucket_of
        for bucket in dict.fromkeys(bucket_of[unit] for unit in owed):
            reduction = self._make_reduction(bucket.units[0], bucket.units)
            reduction.waits_for &= set(owed)
            self._waiting.append(reduction)
        self.start_all()
        guard.end()
        self._owed = {unit: None for unit in self._owed if unit not in owed}

    def find_owed(self, units: Iterable[Unit]) -> list[Unit]:
        """Return the units with gradients that earlier backwards have not reduced and that are to
        be reduced now. The order is the same on all ranks: the last unit first, as in backward."""
        found = [
            unit
            for unit in units
            if unit.trainable and _is_synchronized(unit) and (unit in self._owed or unit.has_grads)
        ]
        return sorted(found, key=lambda unit: -unit.number)

    def units_in_flight(self, is_partial: bool = False) -> set[Unit]:
        """Return the units whose gradients are being reduced.

        Arguments:
            is_partial: return only units whose reduction leaves out the sum over the replicate
                axis.
        """
        return {
            unit
            for reduction in self._in_flight
            if not is_partial or reduction.is_partial
            for unit in reduction.plan.units
        }

    # ---- forgetting

    def clear(self) -> None:
        """Forget what was expected of the backward that is over."""
        if self in self._graph_task.queues:
            self._graph_task.queues.remove(self)
        self._graph_task = _GraphTask()
        self._makes_graph = False
        self._reduction_of.clear()
        self._waiting.clear()
        self.ready.clear()
        self.used.clear()

    def abandon(self) -> None:
        """Forget everything, including reductions in flight and those that are owed."""
        for reduction in self._in_flight:
            reduction.abandon()
        self._in_flight.clear()
        self._owed.clear()
        self.clear()


def _is_synchronized(unit: Unit) -> bool:
    """Return whether backward reduces the gradients of a unit."""
    schedule = unit.groups[0].schedule
    is_put_off = schedule is not None and schedule.is_accumulating
    return not is_put_off and any(group.settings.gradient_sync for group in unit.groups)
