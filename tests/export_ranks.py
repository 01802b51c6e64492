"""Functional collectives on simulated ranks: programs of all ranks run in one process."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.export.recording import default_group_name
from shardwise.world import current


class Routed(TorchDispatchMode):
    """Hands torch's functional collectives to the communicators of simulated ranks."""

    def __init__(self, mesh: sw.DeviceMesh) -> None:
        super().__init__()
        self._ranks = {}
        for count in range(1, mesh.ndim + 1):
            for axes in itertools.combinations(range(mesh.ndim), count):
                ranks = mesh.ranks_along(axes)
                self._ranks[default_group_name(ranks, current().size)] = ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "_c10d_functional":
            return func(*args, **(kwargs or {}))
        name, x = func._opname, args[0]
        if name == "wait_tensor":
            return x
        ranks = self._ranks[args[-1]]
        talk = current().communicator(ranks, ())
        if name == "all_reduce":
            return talk.all_reduce(x, args[1])
        if name == "all_gather_into_tensor":
            return talk.all_gather(x, 0)
        if name == "reduce_scatter_tensor":
            return talk.reduce_scatter(x, 0, op=args[1])
        if name == "all_to_all_single":
            taken, given = args[1:3]
            shapes = [(each, *x.shape[1:]) for each in taken]
            return torch.cat(talk.all_to_all(list(x.split(given)), shapes))
        raise NotImplementedError(name)


def collectives(program: torch.export.ExportedProgram) -> dict[str, int]:
    """How many of each kind are in a program."""
    return dict(
        Counter(
            node.target._opname
            for node in program.graph.nodes
            if getattr(node.target, "namespace", "") == "_c10d_functional"
            and node.target._opname != "wait_tensor"
        )
    )
