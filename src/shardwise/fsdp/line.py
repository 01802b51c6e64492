"""The line of reductions: which gradients are reduced together, in which order, and when.

The order is the reverse of that of use in forward, whatever a rank's own gradients come in: so it
is the same on every rank, and only when a reduction starts is up to each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from weakref import WeakValueDictionary

from shardwise.fsdp.causes import reducing
from shardwise.fsdp.habit import Habit, agree
from shardwise.fsdp.pool import Pool
from shardwise.fsdp.reducing import Reduction
from shardwise.fsdp.unit import Unit


class _Backward:
    """A backward of autograd, which may go through models with a line each.

    They share the ways between ranks, and when gradients come is up to each rank: so the line that
    has begun first goes first, on every rank.
    """

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def launch(self) -> None:
        """Start what is next and ready."""
        for line in self.lines:
            if not line.launch_ready():
                return

    def launch_all(self) -> None:
        """Start everything, at its end: all gradients that come are there."""
        for line in self.lines:
            line.launch_all()


_backwards: WeakValueDictionary[int, _Backward] = WeakValueDictionary()
"""Those under way, by the number that autograd gives them."""


class Line:
    """Reductions to come, and those under way."""

    def __init__(self) -> None:
        self.used: dict[Unit, None] = {}
        """The units whose gradients are expected, in the order of use."""
        self.ready: set[Unit] = set()
        """Those all of whose gradients this backward has brought."""
        self._owed: dict[Unit, None] = {}
        """Those with gradients of earlier backwards, which did not reduce them."""
        self._waiting: list[Reduction] = []
        """In the order in which they are to start."""
        self._by_unit: dict[Unit, Reduction] = {}
        self._under_way: deque[Reduction] = deque()
        self._habit = Habit()
        self.ahead = 1
        """How many may be on their way before the next is put together."""
        self._backward = _Backward()

    def begin(self, task: int, habit: Habit, pool: Pool) -> None:
        """A backward has begun.

        Arguments:
            task: its number.
        """
        self._habit = habit
        self._backward = _backwards.setdefault(task, _Backward())
        self._backward.lines.append(self)
        for unit in (*reversed(self.used), *self._owed):
            self.expect(unit, pool)

    def expect(self, unit: Unit, pool: Pool) -> None:
        """Line up the reduction of a unit, and of those that travel with it, if it is not yet."""
        if unit not in self._by_unit and unit.trainable:
            self._add(unit, pool)

    def _add(self, unit: Unit, pool: Pool) -> None:
        if not _is_synchronised(unit):
            return
        settings = unit.groups[0].settings
        if unit in self.used and unit not in self._by_unit:
            reduction = Reduction(unit.bucket.plan(unit.bucket.units), settings, pool)
            # Of those that travel with it, only the used ones are waited for.
            reduction.waits_for &= self.used.keys()
        else:
            reduction = Reduction(unit.bucket.plan([unit]), settings, pool)
        self._waiting.append(reduction)
        for each in reduction.waits_for:
            self._by_unit[each] = reduction

    def put(self, unit: Unit, pool: Pool) -> None:
        """All gradients of a unit are there."""
        self.ready.add(unit)
        reduction = self._by_unit.get(unit)
        if reduction is None or reduction not in self._waiting:
            if not _is_synchronised(unit):
                unit.keep_gradients()
                return
            self._add(unit, pool)  # its gradients come a second time, or nobody saw it coming
            reduction = self._by_unit[unit]
        reduction.put(unit)
        self._backward.launch()

    def launch_ready(self) -> bool:
        """Start what is next and ready; says whether nothing is left."""
        while self._waiting and not self._waiting[0].waits_for:
            self._launch(self._waiting.pop(0))
        return not self._waiting

    def launch_all(self) -> None:
        """Start all that is left, without the gradients that have not come."""
        while self._waiting:
            self._launch(self._waiting.pop(0))

    def end(self, units: Iterable[Unit], pool: Pool, is_awaited: Callable[[Unit], bool]) -> None:
        """A backward is over.

        Arguments:
            units: all there are.
            is_awaited: whether to wait until the shards of a unit have their gradients.
        """
        for unit in units:
            if unit.got and self._by_unit.get(unit) not in self._waiting:
                self._add(unit, pool)  # not all of them came, or some a second time
                if unit not in self._by_unit:
                    unit.keep_gradients()
        self._owed = {unit: None for unit in (*self._owed, *self.used) if unit not in self._by_unit}
        self._backward.launch_all()
        self._habit.end()
        self.finish(is_awaited)

    def reduce_owed(self, units: Iterable[Unit], habit: Habit, pool: Pool) -> None:
        """Start to reduce what earlier backwards of these units have left, outside of backward."""
        self._habit = habit
        wanted = self.to_reduce(units)
        for bucket in dict.fromkeys(unit.bucket for unit in wanted):
            settings = bucket.units[0].groups[0].settings
            reduction = Reduction(bucket.plan(bucket.units), settings, pool)
            reduction.waits_for &= set(wanted)
            self._waiting.append(reduction)
        self.launch_all()
        habit.end()
        self._owed = {unit: None for unit in self._owed if unit not in wanted}

    def to_reduce(self, units: Iterable[Unit]) -> list[Unit]:
        """Those with gradients that earlier backwards have not reduced, and that are to be reduced
        by now; in an order of all ranks. The last come first, as in backward."""
        found = [
            unit
            for unit in units
            if unit.trainable
            and _is_synchronised(unit)
            and (unit in self._owed or unit.has_gradients)
        ]
        return sorted(found, key=lambda unit: -unit.number)

    def units_under_way(self, is_partial: bool = False) -> set[Unit]:
        """Those whose gradients are being reduced.

        Arguments:
            is_partial: only those that are not being summed over the replicate axis.
        """
        return {
            unit
            for reduction in self._under_way
            if not is_partial or reduction.is_partial
            for unit in reduction.plan.units
        }

    def finish(self, is_awaited: Callable[[Unit], bool] = lambda unit: True) -> None:
        """Wait until shards have the gradients that are under way.

        Arguments:
            is_awaited: whether those of a unit are to be waited for.
        """
        awaited = [each for each in self._under_way if any(map(is_awaited, each.plan.units))]
        for reduction in awaited:
            reduction.go_on()
        for reduction in awaited:
            self._under_way.remove(reduction)
            reduction.finish()

    def _launch(self, reduction: Reduction) -> None:
        units = reduction.plan.units
        if self._habit.departs(tuple(units)):
            with reducing(units):
                agree(reduction.info.communicators(), units, "reduces the gradients of")
        reduction.start()
        self._under_way.append(reduction)
        # By now what was sent before has had the time of a layer, or of several.
        for earlier in list(self._under_way)[: -self.ahead]:
            earlier.go_on()
        while len(self._under_way) > self.ahead + 1:
            self._under_way.popleft().finish()

    def clear(self) -> None:
        """Nothing is expected any more."""
        if self in self._backward.lines:
            self._backward.lines.remove(self)
        self._backward = _Backward()
        self._by_unit.clear()
        self._waiting.clear()
        self.ready.clear()
        self.used.clear()

    def abandon(self) -> None:
        """Forget everything, also what is under way and what is owed."""
        for reduction in self._under_way:
            reduction.abandon()
        self._under_way.clear()
        self._owed.clear()
        self.clear()


def _is_synchronised(unit: Unit) -> bool:
    return any(group.settings.gradient_sync for group in unit.groups)
