"""The schedule of a model: a state machine that decides when units are gathered and reduced.

All groups of a model share one schedule. Its parts are the `Prefetcher` (all_gathers of parameters)
and the `ReduceQueue` (reduce_scatters of gradients); both use `ScheduleGuard`s to detect ranks that
diverge. Gathers and reductions have a channel each, so neither waits for the other.

States. A schedule is in one of four, given by two variables:

    state      depth  in_backward
    REST       0      no           parameters are sharded, unless settings keep them gathered
    FORWARD    > 0    no           modules run
    BACKWARD   0      yes          autograd runs
    RECOMPUTE  > 0    yes          a checkpoint runs modules again in backward, or a forward calls
                                   backward

Each group also has a `TrainingState`. Events, in the order of a training step:

    event                      method                     schedule            group
    outermost module called    begin_forward              REST -> FORWARD
    module called              enter,
                               begin_group_forward                            IDLE -> FORWARD
    module returns             leave, end_group_forward                       FORWARD -> IDLE
    outermost module returns   end_forward                FORWARD -> REST
    output gets a gradient     begin_group_backward       REST -> BACKWARD    IDLE -> PRE_BACKWARD
    gradient gets a gradient   begin_graph_backward       REST -> BACKWARD
    unit has all gradients     _on_grads_ready            REST -> BACKWARD
    unit or inputs have all    check_group_backward_done                      PRE_ -> POST_BACKWARD
    gradients
    autograd has finished      _end_backward              BACKWARD -> REST    any -> IDLE
    finalize_backward()        finalize                   REST
    sw.accumulate() ends       _end_accumulation          REST
    exception in forward       fail_forward               FORWARD -> REST     any -> IDLE
    exception in backward,     recover                    any -> REST         any -> IDLE
    reset_iter_state()

What each event does to parameters and gradients:

    begin_forward              drop gathers of shards that have changed since
    begin_group_forward        gather the group's units; prefetch the next unit
    end_group_forward          reshard the units, unless backward begins with them
    end_forward                drop prefetches that were not used
    begin_group_backward       gather the units; prefetch the unit before
    begin_graph_backward       gather all units, and keep them until the end
    _on_grads_ready            reduce the unit's gradients, once it is first in the queue
    check_group_backward_done  reshard the units
    _end_backward              start all reductions that are left, wait for them, reshard all
    finalize                   reduce the gradients that earlier backwards have left, reshard
    _end_accumulation          the same; after an exception, drop them
    fail_forward, recover      drop all gathers, reshard all; recover also drops gradients

Exceptions to the order: an exception in backward is only noticed by the next event, and a module
that is used twice, or recomputed, may go from POST_BACKWARD to PRE_BACKWARD or FORWARD
(`shardwise.fsdp.errors.transition`).
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import nn

from shardwise.core.errors import CollectiveError
from shardwise.fsdp.all_gather import post_forward_mesh
from shardwise.fsdp.build import UnitSet
from shardwise.fsdp.divergence import ScheduleGuards
from shardwise.fsdp.errors import ShardedState, StateError, TrainingState, transition
from shardwise.fsdp.param_group import ParamGroup
from shardwise.fsdp.prefetch import Prefetcher
from shardwise.fsdp.reduce_queue import ReduceQueue
from shardwise.fsdp.unit import Unit
from shardwise.redistribute.accumulate import Accumulation, current
from shardwise.torch_internals import current_graph_task, engine

if TYPE_CHECKING:
    from shardwise.fsdp.root import GradientReductionHandle


class Schedule:
    """The schedule of some groups.

    Arguments:
        groups: in the order of their modules, which is the first guess of the order in which
            forward uses them.
    """

    def __init__(self, groups: list[ParamGroup]) -> None:
        self.groups = groups
        for group in groups:
            group.schedule = self
        self.unit_set = UnitSet(groups)
        self.prefetcher = Prefetcher(self.unit_set)
        self.reduce_queue = ReduceQueue(self.unit_set)
        self._guards = ScheduleGuards()
        self.settings_changed = False
        """Whether users have changed settings since buckets were made."""
        self.depth = 0
        """How many forwards of groups are under way, one within the other."""
        self.in_backward = False
        self._task = -1
        """The number of autograd's backward that is under way; -1 if none is."""
        self._makes_graph = False
        """Whether that backward can be differentiated itself (`create_graph=True`): gathered
        parameters that it has saved must stay until the end of a backward that cannot."""
        self._goes_through_grads = False
        """Whether that backward computes gradients of gradients, in any order of modules: gathered
        parameters stay until its end."""
        self._outermost: ParamGroup | None = None
        self.is_last_backward = True
        """Whether the end of a backward waits for its reductions."""
        self.outstanding: GradientReductionHandle | None = None
        """The handle of `finalize_backward` that users must wait for before they go on."""
        self.post_optim_event: torch.Event | None = None
        """The event that the next forward waits for, if any."""
        self._accumulation: Accumulation | None = None
        """The `sw.accumulate()` that the last forward was in, if any."""

    # ---- units that follow the modules' parameters and settings

    def update_units(self) -> None:
        """Update the units to the parameters and settings that the modules have now."""
        with torch.inference_mode(False):  # tensors made in inference mode cannot be trained
            if not self.unit_set.is_current():
                self._build()
            for unit in self.unit_set.units:
                unit.follow_requires_grad()
            if self.settings_changed:
                self._apply_settings()

    def _build(self) -> None:
        for group in self.groups:
            if group.is_manual and group.outer is not None:
                raise group.not_root_error("set_manual_backward_finalization")
        self.recover()
        self.unit_set.build()
        self._guards.forget()
        for unit in self.unit_set.units:
            unit.on_grads_ready = self._on_grads_ready
        self.settings_changed = True
        self.prefetcher.reset_order()

    def _apply_settings(self) -> None:
        self.unit_set.make_buckets()
        self._guards.change_settings(tuple(group.settings.schedule for group in self.groups))
        self.settings_changed = False

    # ---- forward

    def begin_forward(self, group: ParamGroup) -> None:
        """Event: the outermost module is called."""
        if self.in_backward:
            if current_graph_task() != -1:
                return  # a checkpoint recomputes a module
            self.recover()  # a backward has failed
        self.check_no_outstanding("forward")
        self.update_units()
        if self.post_optim_event is not None:
            event, self.post_optim_event = self.post_optim_event, None
            event.wait()
        self._outermost = group
        self._accumulation = current.accumulation
        if self._accumulation is not None:
            self._accumulation.others[self] = self._end_accumulation
        self.prefetcher.begin_forward(self._guards.begin((group, torch.is_grad_enabled())))
        for unit in self.unit_set.units:
            if not unit.is_alias and unit.is_stale():
                if unit.gather is not None:
                    unit.gather.drop(unit)
                unit.reshard()
                for user in unit.groups:
                    user.put_shards()

    def enter(self, group: ParamGroup) -> None:
        """Event: a module of a group is called. `leave` or `fail_forward` must follow."""
        self.depth += 1
        group.active_forwards += 1

    def begin_group_forward(self, group: ParamGroup) -> bool:
        """Gather the parameters of a group whose module is called.

        Return whether this call is the recomputation of an activation checkpoint in backward.
        """
        is_recompute = group.state is TrainingState.PRE_BACKWARD
        is_first = group.active_forwards == 1 and group.state is not TrainingState.FORWARD
        if is_first and not is_recompute:
            group.state = transition(group.state, TrainingState.FORWARD, group.name)
        self.prefetcher.start(group.units)
        self.prefetcher.finish(group)
        if not self.in_backward:
            if torch.is_grad_enabled():
                self.reduce_queue.used.update(dict.fromkeys(group.units))
            self.prefetcher.prefetch_forward(group)
        group.put_gathered()
        return is_recompute

    def leave(self, group: ParamGroup) -> bool:
        """Event: a module of a group returns, or fails.

        Return whether this ends the group's forward. A nested call or a recomputation does not.
        """
        self.depth -= 1
        group.active_forwards -= 1
        if group.active_forwards:
            return False
        if group.state is not TrainingState.PRE_BACKWARD:
            group.put_shards()
        if group.state is not TrainingState.FORWARD:
            return False
        group.state = transition(group.state, TrainingState.IDLE, group.name)
        return True

    def end_group_forward(self, group: ParamGroup, module: nn.Module, needs_backward: bool) -> None:
        """Reshard the parameters of a group after its forward, or keep them for backward.

        Arguments:
            module: the module of the group that has returned.
            needs_backward: whether one of its outputs requires gradients.
        """
        group.finished_modules.add(module)
        self.prefetcher.note_forward_done(group)
        reshard = group.settings.reshard_after_forward
        if reshard is None:
            begins_backward = group is self._outermost or self.prefetcher.is_used_last(group)
            reshard = not (needs_backward and begins_backward)
        if not needs_backward and torch.is_grad_enabled():
            # Outputs may hide tensors that require gradients, whose backward comes unannounced:
            # keep the parameters until its end.
            has_inputs = any(call.input_count for call in group.open_calls)
            if has_inputs or any(unit.trainable for unit in group.units):
                reshard = False
        has_modules_left = len(group.finished_modules) < len(group.modules)
        if reshard is not False and not self.in_backward and not has_modules_left:
            self._release(group, reshard)

    def end_forward(self) -> None:
        """Event: the outermost module returns."""
        if self.in_backward:
            return
        for group in self.groups:
            count = len(group.finished_modules)
            if count and count < len(group.modules) and not torch.is_grad_enabled():
                self._release(group, True)
            group.finished_modules.clear()
        self.prefetcher.end_forward()

    def _release(self, group: ParamGroup, reshard: bool | int) -> None:
        """Reshard the units of a group that no other group needs.

        Arguments:
            reshard: True, or the number of ranks to shard over until backward.
        """
        if not group.active_forwards:
            group.put_shards()
        for unit in group.units:
            unit.holders.discard(group)
            if unit.holders or unit.state is not ShardedState.UNSHARDED or unit.is_alias:
                continue
            if reshard is True or not torch.is_grad_enabled():
                unit.reshard()
            else:
                mesh, index = post_forward_mesh(unit, reshard)
                unit.reshard_post_forward(index, mesh.size())

    # ---- backward

    def begin_group_backward(self, group: ParamGroup) -> None:
        """Event: an output of a group gets a gradient."""
        self._begin_backward()
        group.lock_manual_mode()
        if group.state is TrainingState.PRE_BACKWARD:
            return
        group.state = transition(group.state, TrainingState.PRE_BACKWARD, group.name)
        for unit in group.units:
            self.reduce_queue.expect(unit)
        if group.settings.unshard_in_backward:
            self.prefetcher.start(group.units)
            self.prefetcher.finish(group)
            group.put_gathered()  # a checkpoint in its forward may recompute a part of it
        self.prefetcher.prefetch_backward(group)

    def _begin_backward(self) -> None:
        task = current_graph_task()
        if self.in_backward:
            if task == self._task or _is_nested_backward():
                return
            self.recover()  # the last one has failed
        self.check_no_outstanding("backward")
        if self.settings_changed:
            self._apply_settings()
        self.in_backward, self._task = True, task
        self._makes_graph = torch.is_grad_enabled()
        self.prefetcher.begin_backward(self._guards.begin("gathers"))
        engine.queue_callback(_EndOfBackward(self, task))
        self.reduce_queue.begin(task, self._guards.begin("reductions"), self._makes_graph)

    def begin_graph_backward(self) -> None:
        """Event: a gradient of a shard, which has a history, gets a gradient itself.

        Its backward may need any parameter before an output of a module gets a gradient.
        """
        self._begin_backward()
        if not self._goes_through_grads:
            self._goes_through_grads = True
            for group in self.groups:
                self.prefetcher.start(group.units)
                self.prefetcher.finish(group)

    def _on_grads_ready(self, unit: Unit) -> None:
        """Event: all gradients of a unit are computed."""
        self._begin_backward()
        for group in unit.groups:
            group.lock_manual_mode()
        self.reduce_queue.put(unit)
        for group in unit.groups:
            self.check_group_backward_done(group)

    def check_group_backward_done(self, group: ParamGroup) -> None:
        """Event: the gradients of a unit, or of all inputs of a group, are computed.

        Once all units and all inputs of the group have their gradients, nothing needs its
        parameters any more, and they are resharded.
        """
        if group.state is not TrainingState.PRE_BACKWARD or group.open_calls:
            return
        if group.is_alias:
            return  # it has nothing to free; its inputs are not watched, so backward may go on
        if any(unit.trainable and unit not in self.reduce_queue.ready for unit in group.units):
            return
        group.state = transition(group.state, TrainingState.POST_BACKWARD, group.name)
        if not group.active_forwards:
            group.put_shards()
        keeps = self._makes_graph or self._goes_through_grads
        if group.settings.reshard_after_backward and not keeps:
            self._release(group, True)

    def _end_backward(self) -> None:
        """Event: autograd has finished a backward."""
        self.reduce_queue.end(self._is_awaited)
        if self.is_last_backward:
            for group in self.groups:
                if not group.iteration_is_manual:
                    group.iteration_is_manual = None
        self.prefetcher.end_backward()
        for group in self.groups:
            if group.active_forwards:
                continue  # its forward has called this backward
            group.open_calls.clear()
            if group.state is not TrainingState.IDLE:
                group.state = transition(group.state, TrainingState.IDLE, group.name)
            group.put_shards()
            if group.settings.reshard_after_backward and not self._makes_graph:
                self._release(group, True)
        self._clear_backward()

    def _is_awaited(self, unit: Unit) -> bool:
        """Return whether the end of a backward waits for the gradients of a unit."""
        is_manual = all(group.root.iteration_is_manual for group in unit.groups)
        return self.is_last_backward and not is_manual

    def _clear_backward(self) -> None:
        self.in_backward, self._task = False, -1
        self._goes_through_grads = False
        self.reduce_queue.clear()
        self.prefetcher.clear_backward()

    # ---- accumulation

    @property
    def is_accumulating(self) -> bool:
        """Whether reductions are put off by `sw.accumulate()`."""
        return self._accumulation is not None and self._accumulation.is_open

    def _end_accumulation(self, keeps: bool) -> None:
        """Event: `sw.accumulate()` ends.

        Arguments:
            keeps: whether to reduce the gradients that it has put off, or to drop them.
        """
        self._accumulation = None
        if keeps:
            self.reduce_put_off()
        else:
            self.recover()

    def reduce_put_off(self) -> None:
        """Reduce the gradients that were put off, unless a module is running."""
        if not (self.depth or self.in_backward):
            accumulation, self._accumulation = self._accumulation, None
            for root in dict.fromkeys(group.root for group in self.groups):
                self.finalize(root, waits=True)
            self._accumulation = accumulation

    # ---- requests of users

    def finish_unshard(self, group: ParamGroup) -> None:
        """Wait for the gather of `unshard`, and put the parameters into the modules, unless they
        were resharded in the meantime."""
        if all(unit.gather is not None or unit.is_gathered for unit in group.units):
            self.prefetcher.finish(group)
            group.put_gathered()

    def finalize(self, root: ParamGroup, waits: bool) -> None:
        """Reduce the gradients that the backwards of a root have left, and reshard its parameters.

        Arguments:
            waits: whether to wait until all shards have their gradients.
        """
        if self.settings_changed:
            self._apply_settings()
        groups = [group for group in self.groups if group.root is root]
        units = dict.fromkeys(unit for group in groups for unit in group.units)
        self.reduce_queue.reduce_owed(units, self._guards.begin("finalization"))
        for group in groups:
            is_done = not group.active_forwards and not self._makes_graph
            if group.settings.reshard_after_backward and is_done:
                self._release(group, True)
        if waits:
            self.finish_finalization(root)

    def finish_finalization(self, root: ParamGroup) -> None:
        """Wait for the reductions that `finalize` has left in flight."""
        self.reduce_queue.finish()
        root.iteration_is_manual = None

    def check_no_outstanding(self, action: str) -> None:
        """Raise `StateError` if users have not waited for a handle of `finalize_backward`."""
        if self.outstanding is not None:
            raise StateError(
                f"{action}: finalize_backward(async_op=True) has left reductions under way; call "
                "wait() of the handle that it has returned first"
            )

    # ---- exceptions

    def fail_forward(self, group: ParamGroup) -> None:
        """Event: a forward of a group has raised an exception."""
        self.leave(group)
        if self.in_backward:
            return
        if self.depth == 0:
            self._stop()
        elif not group.active_forwards:
            self._release(group, True)  # a module around it may handle the exception, and go on

    def recover(self) -> None:
        """Event: a backward has failed, or users reset the iteration. Drop the iteration, and all
        gradients that have not reached the shards."""
        self.reduce_queue.abandon()
        for unit in self.unit_set.units:
            unit.forget_grads()
        for group in self.groups:
            group.iteration_is_manual = None
        self.outstanding = None
        self._clear_backward()
        self._stop()

    def _stop(self) -> None:
        """Drop all gathers and reshard all parameters; gradients of earlier backwards stay."""
        self.depth = 0
        self.prefetcher.fail_forward()
        for unit in self.unit_set.units:
            if unit.gather is not None:
                with suppress(CollectiveError):
                    unit.gather.drop(unit)
                unit.gather = None
            unit.reshard()
        for group in self.groups:
            group.state = TrainingState.IDLE
            group.active_forwards = 0
            group.finished_modules.clear()
            group.open_calls.clear()
            group.put_shards()


class _EndOfBackward:
    """A callback at the end of a backward. Autograd drops it uncalled if the backward fails."""

    def __init__(self, schedule: Schedule, task: int) -> None:
        self._schedule = ref(schedule)
        self._task = task

    def __call__(self) -> None:
        schedule = self._schedule()
        if schedule is not None and schedule._task == self._task:
            schedule._end_backward()

    def __del__(self) -> None:
        schedule = self._schedule()
        if schedule is not None and schedule._task == self._task:
            for group in schedule.groups:
                group.put_shards()


def _is_nested_backward() -> bool:
    """Return whether another backward has started this one, as reentrant checkpoints do."""
    frame, found = sys._getframe(), 0
    while frame.f_back is not None:
        found += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back
    return found > 1
