"""Which groups share a context: those of one model, and those that have parameters in common."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.fsdp.context import Context
from shardwise.fsdp.group import Group


def context_of(group: Group) -> Context:
    """The context of a group that runs for the first time: of all groups in the outermost module
    that is sharded, and of those that they share parameters with."""
    groups = _named_groups(group.root.modules)
    if group not in groups:  # its module was taken out of the outer one
        groups = _named_groups(group.modules)
    for each in groups:  # which grows on the way
        groups += [other for other in each.tied() if other not in groups]
    return joined(groups)


def _named_groups(modules: Sequence[nn.Module]) -> list[Group]:
    groups = []
    for module in modules:
        for name, each in module.named_modules():
            group = getattr(each, "_fsdp_group", None)
            if isinstance(group, Group) and group not in groups:
                group.name = name or type(each).__name__
                groups.append(group)
    return groups


def joined(groups: Sequence[Group]) -> Context:
    """One context for groups, and for all those that shared one with any of them before."""
    found = dict.fromkeys(groups)
    for group in groups:
        if group.context is not None:
            group.context.recover()
            found.update(dict.fromkeys(group.context.groups))
    return Context(list(found))
