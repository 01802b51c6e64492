"""The process groups of a program: what it calls them, and making them where it runs.

A program says who talks by names. All ranks are torch's default group, which is there once
`torch.distributed` has started. Others are named by their ranks, `ranks_0_2`, and have to be made
and registered under that name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.export import ExportedProgram

from shardwise import world
from shardwise.export.cleaning import is_collective
from shardwise.export.errors import ExportError
from shardwise.torch_internals import register_group, resolve_group

_DEFAULT = "0"  # what torch calls its default group
_PREFIX = "ranks_"


def group_name(ranks: tuple[int, ...], size: int) -> str:
    """What a program for `size` ranks calls a group of some of them."""
    if ranks == tuple(range(size)):
        return _DEFAULT
    return _PREFIX + "_".join(map(str, ranks))


def registered(ranks: tuple[int, ...], here: Any) -> str:
    """The name of a group, under which torch finds it from now on; all of its ranks must call it.

    Arguments:
        here: the world of this process.
    """
    name = group_name(ranks, here.size)
    group = here.process_group(ranks)
    if name != group.group_name and not _is_known(name):
        register_group(name, group)
    return name


def make_groups(program: ExportedProgram) -> dict[str, ProcessGroup]:
    """Make the process groups that a program talks through; needed once in each process that loads
    it, unless all of its collectives are of all ranks.

    All ranks call it, with their programs. Without shardwise, make and register them by torch:

    ```py
    for ranks in ([0, 1], [2, 3]):  # every rank takes part in making every group
        group = torch.distributed.new_group(ranks)
        if torch.distributed.get_rank() in ranks:
            name = "ranks_" + "_".join(map(str, ranks))
            torch._C._distributed_c10d._register_process_group(name, group)
    ```

    Returns:
        The groups by name.
    """
    here: Any = world.current()
    if here.is_simulated or not torch.distributed.is_initialized():
        raise ExportError(
            "make_groups: expected torch.distributed to be started, with one process for each rank;"
            f" {here.describe()}"
        )
    found = {}
    for name in group_names(program):
        if name.startswith(_PREFIX):
            registered(tuple(map(int, name.removeprefix(_PREFIX).split("_"))), here)
        found[name] = resolve_group(name)
    return found


def group_names(program: ExportedProgram) -> list[str]:
    """What a program calls the groups that it talks through, in the order of their use."""
    names = [str(node.args[-1]) for node in program.graph.nodes if is_collective(node)]
    return list(dict.fromkeys(names))


def _is_known(name: str) -> bool:
    try:
        resolve_group(name)
    except RuntimeError:
        return False
    return True
