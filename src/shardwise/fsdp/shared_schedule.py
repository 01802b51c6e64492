"""Sharing of schedules: groups of one model, and groups with common parameters, share one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.fsdp.param_group import ParamGroup
from shardwise.fsdp.schedule import Schedule


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
