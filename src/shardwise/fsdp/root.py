"""Roots: the outermost sharded modules, whose groups share a schedule and end backward together.

All groups of a model share a schedule, and so do groups with common parameters.

By default an iteration of a root ends with autograd's backward: all gradients are reduced, and the
shards have them. With manual finalization, a backward that has several parts, such as that of a
pipeline stage, ends when `finalize_backward` is called. The remaining gradients are then reduced,
and parameters resharded, by the settings at that time.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.fsdp.errors import StateError, check_bool
from shardwise.fsdp.param_group import ParamGroup
from shardwise.fsdp.schedule import Schedule
from shardwise.torch_internals import current_graph_task

# ---- schedules


def schedule_of(group: ParamGroup) -> Schedule:
    """Return the schedule of a group.

    The first call makes it, for all groups in the outermost sharded module and all groups that
    share parameters with them.
    """
    if group.schedule is not None:
        return group.schedule
    groups = _find_groups(group.root.modules)
    if group not in groups:  # its module was taken out of the outer one
        groups = _find_groups(group.modules)
    for each in groups:  # the list grows in this loop
        groups += [other for other in each.find_tied_groups() if other not in groups]
    return share_schedule(groups)


def updated_schedule_of(group: ParamGroup) -> Schedule:
    """Return the schedule of a group, with units that have the modules' present parameters."""
    schedule = schedule_of(group)
    schedule.update_units()
    return schedule


def share_schedule(groups: Sequence[ParamGroup]) -> Schedule:
    """Make one schedule for groups, and for all groups that shared one with any of them."""
    found = dict.fromkeys(groups)
    for group in groups:
        if group.schedule is not None:
            group.schedule.recover()
            found.update(dict.fromkeys(group.schedule.groups))
    return Schedule(list(found))


def _find_groups(modules: Sequence[nn.Module]) -> list[ParamGroup]:
    """Return the groups of modules and their submodules, and name each by its module's path."""
    groups = []
    for module in modules:
        for name, each in module.named_modules():
            group = getattr(each, "_fsdp_group", None)
            if isinstance(group, ParamGroup) and group not in groups:
                group.name = name or type(each).__name__
                groups.append(group)
    return groups


# ---- manual finalization

_SETTER = "set_manual_backward_finalization"


class GradientReductionHandle:
    """Reductions of gradients that `finalize_backward(async_op=True)` has left under way."""

    def __init__(self, root: ParamGroup | None = None) -> None:
        self._root = root
        self._schedule = None if root is None else root.schedule

    def wait(self) -> None:
        """Wait until the shards have their gradients. A second call does nothing.

        Raises:
            StateError: `reset_iter_state` has forgotten them since.
        """
        schedule, root = self._schedule, self._root
        if schedule is None or root is None:
            return
        if schedule.outstanding is not self:
            raise StateError(
                "wait: reset_iter_state, or a change of the parameters, has forgotten the "
                "gradients of this handle; run the iteration again"
            )
        schedule.finish_finalization(root)
        schedule.outstanding = None
        self._root = self._schedule = None

    def check_owner(self, root: ParamGroup) -> None:
        """Raise `StateError` unless the gradients belong to this root."""
        if root is not self._root:
            assert self._root is not None, "it is outstanding"
            raise StateError(
                f"reset_iter_state: {root.name} shares its schedule with {self._root.name}, whose "
                "gradients are under way; call wait() of the handle of its finalize_backward, or "
                "reset_iter_state() of that module, first"
            )


def set_manual(group: ParamGroup, enabled: bool) -> None:
    """Choose whether users end the backwards of a root."""
    check_bool("enabled", enabled)
    if group.outer is not None:
        if enabled or not group.is_manual:
            raise group.not_root_error(_SETTER)
        group.is_manual = False  # it was set before a module around it was sharded
        return
    if enabled != group.is_manual and current_graph_task() != -1:
        raise StateError(f"{_SETTER}: the mode cannot change during a backward; call it before")
    if group.iteration_is_manual is not None and enabled != group.iteration_is_manual:
        raise StateError(
            f"{_SETTER}: the mode cannot change after a backward of {group.name} has begun; end it "
            "first: by finalize_backward(), by a backward with set_is_last_backward(True), or by "
            "reset_iter_state()"
        )
    group.is_manual = enabled


def finalize(group: ParamGroup, async_op: bool) -> GradientReductionHandle | None:
    """End the backwards of a root; with `async_op`, return a handle to wait for the gradients."""
    check_bool("async_op", async_op)
    schedule = group.schedule
    if schedule is None:  # no forward has run yet
        return GradientReductionHandle() if async_op else None
    _check_may_finalize(group, schedule)
    if not async_op:
        schedule.finalize(group, waits=True)
        return None
    _check_no_other_root(group, schedule)
    schedule.finalize(group, waits=False)
    schedule.outstanding = GradientReductionHandle(group)
    return schedule.outstanding


def _check_may_finalize(group: ParamGroup, schedule: Schedule) -> None:
    schedule.check_no_outstanding("finalize_backward")
    if group.outer is not None:
        raise group.not_root_error("finalize_backward")
    is_manual = group.iteration_is_manual
    if not (group.is_manual if is_manual is None else is_manual):
        raise StateError(
            f"finalize_backward: the backward of {group.name} ends by itself; call {_SETTER}(True) "
            "before forward"
        )
    if schedule.in_backward:
        raise StateError(
            "finalize_backward: a backward is under way; call it afterwards, or after an exception "
            "reset_iter_state()"
        )
    units = [unit for other in schedule.groups if other.root is group for unit in other.units]
    partial = schedule.reduce_queue.units_in_flight(is_partial=True)
    for unit in schedule.reduce_queue.find_owed(units):
        if unit.info.replicate_mesh_size > 1 and not unit.groups[0].settings.all_reduce:
            partial.add(unit)
    for unit in units:
        if unit in partial or any(param.reduced is not None for param in unit.params):
            raise StateError(
                f"finalize_backward: the gradients of {unit.describe()} are not summed over the "
                "replicate axis, which manual finalization must do; call "
                "set_requires_all_reduce(True) before, and reset_iter_state() if some were reduced "
                "without"
            )


def _check_no_other_root(group: ParamGroup, schedule: Schedule) -> None:
    """Raise `StateError` if another root of the schedule has work under way, with which reductions
    left in flight would mix."""
    for unit in {*schedule.reduce_queue.units_in_flight(), *schedule.reduce_queue.used}:
        for other in unit.groups:
            if other.root is not group:
                raise StateError(
                    f"finalize_backward(async_op=True): {other.root.name} shares the schedule of "
                    f"{group.name} and has work under way; end its backward first, or use "
                    "async_op=False"
                )
