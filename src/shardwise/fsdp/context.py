"""The schedule of a model: what is gathered and reduced when.

All groups of a model share one context. It records in which order units are used, so that the next
ones are gathered while this one computes, forward and backward. Gradients are reduced in the
reverse of that order, whenever the next in line are there: what comes in which order is the same on
every rank, only when it comes is up to each. Gathers and reductions have a channel each, so neither
waits for the other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from weakref import ref

import torch

from shardwise.comm import communicator
from shardwise.errors import CollectiveError
from shardwise.fsdp.arena import is_in
from shardwise.fsdp.building import Bucket, buckets_of, built
from shardwise.fsdp.causes import gathering
from shardwise.fsdp.extended import ExtendedGather, ExtendedUnit
from shardwise.fsdp.finalizing import (
    GradientReductionHandle,
    check_outstanding,
    check_roots,
    note_begun,
)
from shardwise.fsdp.gathering import Gather, KeptGather, kept_mesh
from shardwise.fsdp.group import Group
from shardwise.fsdp.habit import Habit, Habits, agree
from shardwise.fsdp.line import Line
from shardwise.fsdp.order import Order
from shardwise.fsdp.pool import Pool
from shardwise.fsdp.states import ShardedState, TrainingState, moved_on
from shardwise.fsdp.unit import Unit
from shardwise.torch_internals import as_local, current_graph_task, engine, own_parameters

_UNSHARDED = ShardedState.UNSHARDED


class Context:
    """The schedule of some groups.

    Arguments:
        groups: in the order of their modules, which is the first guess of the order of use.
    """

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        for group in groups:
            group.context = self
        self.units: list[Unit] = []
        self.buckets: list[Bucket] = []
        self.pool = Pool()
        self.settings_changed = False
        self.depth = 0
        """How many forwards of groups are under way, one within the other."""
        self.in_backward = False
        self.is_last_backward = True
        self._task = -1
        """The id of autograd's backward that is under way; -1 if none is."""
        self._makes_graph = False
        """Whether that can be differentiated itself (`create_graph=True`): what it has saved of
        gathered parameters must stay until the end of a backward that cannot."""
        self._outermost: Group | None = None
        self._begun = Order([])
        """The units in the order in which the last forward came to the modules that use them."""
        self._ended = Order([])
        """The same in the order in which it was done with those. Backward goes the other way: it
        begins with a head that is in the group of the whole model, and then come the layers."""
        self._begun_now: dict[Unit, None] = {}
        self._ended_now: dict[Unit, None] = {}
        """The same of this forward, so far."""
        self.line = Line()
        """The reductions of gradients."""
        self.outstanding: GradientReductionHandle | None = None
        """What users must wait for before they go on."""
        self.post_optim_event: torch.Event | None = None
        """What the next forward waits for, if anything."""
        self._had: set[Unit] = set()
        """Those that were gathered at some time in this backward. When they are given back depends
        on what this rank has used; so that all ranks gather alike, they are not gathered again
        unless a module asks."""
        self._habits = Habits()
        self._gathers_forward: Habit | None = None
        self._gathers_backward = Habit()

    # ---- making units, and keeping them up to date

    def check(self) -> None:
        """See to it that units hold the parameters that the modules have."""
        with torch.inference_mode(False):  # else what is made here could never be trained with
            if not self.units or not self._is_current():
                self._build()
            for unit in self.units:
                unit.follow_requires_grad()
            if self.settings_changed:
                self._make_buckets()

    def _is_current(self) -> bool:
        for group in self.groups:
            for slot, held in group.bindings:
                found: Any = own_parameters(slot.module).get(slot.key)
                if found is not held.sharded and found is not held.whole:
                    return False
        with as_local():
            return all(map(is_in, self.units))

    def _build(self) -> None:
        check_roots(self.groups)
        self.recover()
        self.units = built(self.groups)
        self.buckets = []
        self.pool = Pool()
        self._habits.forget()
        for unit in self.units:
            unit.on_ready = self._on_ready
        self.settings_changed = True
        self._begun = self._ended = Order(self.units)

    def _make_buckets(self) -> None:
        self.buckets = buckets_of(self.units, self.buckets)
        sizes = [size for bucket in self.buckets for size in bucket.sizes()]
        self.pool.expect(sizes)
        self._habits.change(tuple(group.settings.schedule for group in self.groups))
        self.settings_changed = False

    # ---- forward

    def begin(self, group: Group) -> None:
        """Before the outermost forward."""
        if self.in_backward:
            if current_graph_task() != -1:
                return  # a checkpoint computes something anew
            self.recover()  # a backward has failed
        check_outstanding(self, "forward")
        self.check()
        if self.post_optim_event is not None:
            event, self.post_optim_event = self.post_optim_event, None
            event.wait()
        self._outermost = group
        self._begun_now, self._ended_now = {}, {}
        self._gathers_forward = self._habits.begun((group, torch.is_grad_enabled()))
        for unit in self.units:
            if not unit.is_alias and unit.is_stale():
                if unit.gather is not None:
                    unit.gather.drop(unit)
                unit.reshard()
                for user in unit.groups:
                    user.put_shards()

    def unshard_for_forward(self, group: Group) -> None:
        """Gather what a group needs, and start to gather what probably comes next."""
        self.start(group.units)
        self.finish_gathers(group)
        if self.in_backward:
            return
        records = torch.is_grad_enabled()
        for unit in group.units:
            self._begun_now[unit] = None
            if records:
                self.line.used[unit] = None
        self._prefetch(group, group.forward_prefetch, self._begun, 1)

    def after_forward(self, group: Group, needs_backward: bool) -> None:
        """Give back the memory of a group's parameters, or keep it for backward."""
        for unit in group.units:
            self._ended_now.pop(unit, None)  # the last time counts, which comes first in backward
            self._ended_now[unit] = None
        wanted = group.settings.reshard_after_forward
        if wanted is None:
            wanted = not needs_backward or not self._is_needed_next(group)
        if not needs_backward and torch.is_grad_enabled():
            # A backward may come without telling, of outputs that hide their tensors: then keep
            # it until the end of that.
            has_graph = any(call.inputs for call in group.calls) or any(
                unit.trainable for unit in group.units
            )
            wanted = wanted if not has_graph else False
        if wanted is False or self.in_backward or len(group.ran) < len(group.modules):
            return
        self.release(group, wanted)

    def _is_needed_next(self, group: Group) -> bool:
        """Whether backward begins with a group: it is the outermost, or travels with the last."""
        if group is self._outermost:
            return True
        last = self._begun.last.bucket
        return all(unit.bucket is last for unit in group.units)

    def release(self, group: Group, wanted: bool | int) -> None:
        """Give up what a group has gathered; a number says over how many ranks to split it."""
        if not group.active:
            group.put_shards()
        for unit in group.units:
            unit.holders.discard(group)
            if unit.holders or unit.state is not _UNSHARDED or unit.is_alias:
                continue
            if wanted is True or not torch.is_grad_enabled():
                unit.reshard()
            else:
                mesh, index = kept_mesh(unit, wanted)
                unit.keep(index, mesh.size())

    def end_forward(self) -> None:
        """After the outermost forward."""
        if self.in_backward:
            return
        for group in self.groups:
            if group.ran and len(group.ran) < len(group.modules) and not torch.is_grad_enabled():
                self.release(group, True)
            group.ran.clear()
        self._drop_gathers()
        if self._gathers_forward is not None:
            self._gathers_forward.end()
            self._gathers_forward = None
        if self._begun_now:
            self._begun = self._begun.after(self._begun_now)
            self._ended = self._ended.after(self._ended_now)

    # ---- gathering

    def start(self, units: Iterable[Unit]) -> None:
        """Start to gather some units, with those that travel with them."""
        for unit in units:
            if unit.state is _UNSHARDED or unit.gather is not None or unit.is_alias:
                continue
            if unit.state is ShardedState.SHARDED_POST_FORWARD:
                mesh, _ = kept_mesh(unit, unit.kept_count)
                KeptGather(unit, communicator(mesh, (0,), channel="gather"))
                continue
            run = unit.bucket.run_around(unit, self._had)
            if self.in_backward:
                self._had.update(run)
            habit = self._gathers_backward if self.in_backward else self._gathers_forward
            if habit is not None and habit.departs(tuple(run)):
                with gathering(run):
                    agree([unit.info.shard_communicator("")], run, "gathers")
            kind = ExtendedGather if isinstance(unit, ExtendedUnit) else Gather
            kind(run, self.pool, unit.groups[0].settings.all_gather)

    def finish_gathers(self, group: Group) -> None:
        """Wait for what a group needs."""
        for unit in group.units:
            unit.holders.add(group)
            if unit.gather is not None:
                unit.gather.fill(unit)
            elif unit.is_alias:
                unit.state = _UNSHARDED

    def _prefetch(self, group: Group, wanted: list[Group] | None, order: Order, step: int) -> None:
        if wanted is not None:
            for other in wanted:
                self.start(other.units)
            return
        if not group.units:
            return
        for unit in order.beyond(group.units[-1 if step > 0 else 0], step):
            if unit.gather is not None:
                return  # one ahead is enough
            if unit.state is not _UNSHARDED and not unit.is_alias and unit not in self._had:
                if step > 0 or unit.groups[0].settings.unshard_in_backward:
                    self.start([unit])
                return

    def _drop_gathers(self) -> None:
        """Wait for gathers that nobody has used: they must be over before shards may change."""
        for unit in self.units:
            if unit.gather is not None:
                unit.gather.drop(unit)

    # ---- backward

    def begin_backward_of(self, group: Group) -> None:
        """A gradient has come to one of its outputs."""
        self._begin_backward()
        note_begun(group)
        if group.state is TrainingState.PRE_BACKWARD:
            return
        group.state = moved_on(group.state, TrainingState.PRE_BACKWARD, group.name)
        for unit in group.units:
            self.line.expect(unit, self.pool)
        if group.settings.unshard_in_backward:
            self.start(group.units)
            self.finish_gathers(group)
            group.put_wholes()  # a checkpoint in its forward may compute a part of it anew
        self._prefetch(group, group.backward_prefetch, self._ended, -1)

    def _begin_backward(self) -> None:
        task = current_graph_task()
        if self.in_backward:
            if task == self._task or _is_nested():
                return
            self.recover()  # the last one has failed
        check_outstanding(self, "backward")
        if self.settings_changed:
            self._make_buckets()
        self.in_backward, self._task = True, task
        self._makes_graph = torch.is_grad_enabled()
        self._had.update(
            unit for unit in self.units if unit.state is _UNSHARDED or unit.gather is not None
        )
        self._gathers_backward = self._habits.begun("gathers")
        engine.queue_callback(_End(self, task))
        self.line.begin(task, self._habits.begun("reductions"), self.pool)

    def _on_ready(self, unit: Unit) -> None:
        """All gradients of a unit are there."""
        self._begin_backward()
        for group in unit.groups:
            note_begun(group)
        self.line.put(unit, self.pool)
        for group in unit.groups:
            self.check_done(group)

    def check_done(self, group: Group) -> None:
        """Give back a group's memory once nothing in its backward needs it any more: the gradients
        of all inputs and of all parameters are there."""
        if group.state is not TrainingState.PRE_BACKWARD or group.calls:
            return
        if group.is_alias:
            return  # nothing to give back, and its inputs are not watched: it may go on
        if any(unit.trainable and unit not in self.line.ready for unit in group.units):
            return
        group.state = moved_on(group.state, TrainingState.POST_BACKWARD, group.name)
        if not group.active:
            group.put_shards()
        if group.settings.reshard_after_backward and not self._makes_graph:
            self.release(group, True)

    def _end_backward(self) -> None:
        self.line.end(self.units, self.pool, self._is_awaited)
        if self.is_last_backward:
            for group in self.groups:
                if not group.is_manual_now:
                    group.is_manual_now = None
        self._drop_gathers()
        self._gathers_backward.end()
        for group in self.groups:
            if group.active:
                continue  # this backward was started in its forward
            group.calls.clear()
            if group.state is not TrainingState.IDLE:
                group.state = moved_on(group.state, TrainingState.IDLE, group.name)
            group.put_shards()
            if group.settings.reshard_after_backward and not self._makes_graph:
                self.release(group, True)
        self._clear()

    def _is_awaited(self, unit: Unit) -> bool:
        """Whether the end of a backward waits for the gradients of a unit."""
        return self.is_last_backward and not all(group.root.is_manual_now for group in unit.groups)

    def finalize(self, root: Group, waits: bool) -> None:
        """The backwards of a root are over: reduce what they have left, and give back memory.

        Arguments:
            waits: whether to wait until all shards have their gradients.
        """
        if self.settings_changed:
            self._make_buckets()
        groups = [group for group in self.groups if group.root is root]
        units = dict.fromkeys(unit for group in groups for unit in group.units)
        self.line.reduce_owed(units, self._habits.begun("finalization"), self.pool)
        for group in groups:
            if group.settings.reshard_after_backward and not group.active and not self._makes_graph:
                self.release(group, True)
        if waits:
            self.end_iteration(root)

    def end_iteration(self, root: Group) -> None:
        """Wait for what `finalize` has left under way."""
        self.line.finish()
        root.is_manual_now = None

    def _clear(self) -> None:
        self.in_backward, self._task = False, -1
        self.line.clear()
        self._had.clear()

    # ---- after exceptions

    def recover(self) -> None:
        """Forget the iteration under way, with its gradients that no shard has got yet."""
        self.line.abandon()
        for unit in self.units:
            unit.forget_gradients()
        for group in self.groups:
            group.is_manual_now = None
        self.outstanding = None
        self._clear()
        self.settle()

    def settle(self) -> None:
        """Bring everything to rest after a forward that has failed; gradients of earlier ones
        stay."""
        self.depth = 0
        self._gathers_forward = None
        for unit in self.units:
            if unit.gather is not None:
                with suppress(CollectiveError):
                    unit.gather.drop(unit)
                unit.gather = None
            unit.reshard()
        for group in self.groups:
            group.state = TrainingState.IDLE
            group.active = 0
            group.ran.clear()
            group.calls.clear()
            group.put_shards()


class _End:
    """What happens at the end of a backward; or when it is dropped, as the backward has failed."""

    def __init__(self, context: Context, task: int) -> None:
        self._context = ref(context)
        self._task = task

    def __call__(self) -> None:
        context = self._context()
        if context is not None and context._task == self._task:
            context._end_backward()

    def __del__(self) -> None:
        context = self._context()
        if context is not None and context._task == self._task:
            for group in context.groups:
                group.put_shards()


def _is_nested() -> bool:
    """Whether this backward was started by another, as the older kind of checkpoints does."""
    frame, found = sys._getframe(), 0
    while frame.f_back is not None:
        found += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back
    return found > 1
