"""Writes that others should see through views, where ranks have copies."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from shardwise.export.cleaning import writes
from shardwise.export.errors import ExportError
from shardwise.tensor import DTensor, as_local, severed_by


class Views:
    """Which nodes of a graph may share memory.

    Part of a dim that is split is a copy, as it has to travel: what is written to it does not reach
    the original, nor does it see what is written there. Programs that return what they write, as
    those after `run_decompositions()` do, have no such nodes.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._origins: dict[fx.Node, set[fx.Node]] = {}
        for node in graph.nodes:
            viewed = _arguments(node, of_writes=False)
            self._origins[node] = {node}.union(*(self._origins[each] for each in viewed))

    def check(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> None:
        """Refuse a write that would be missed.

        Arguments:
            values: those of the nodes so far.
        """
        if not writes(node):
            return
        for target in _arguments(node, of_writes=True):
            if _is_copy(values.get(target)):
                raise _refused(f"{node.name} writes to what {target.name}")
            for other, value in values.items():
                shares = not self._origins[other].isdisjoint(self._origins[target])
                if shares and _is_copy(value) and any(node < user for user in other.users):
                    raise _refused(f"{node.name} writes to what {other.name}, which is used later,")


def _arguments(node: fx.Node, of_writes: bool) -> list[fx.Node]:
    """What a node writes to, or what its result may be a view of."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.all_input_nodes if node.target is operator.getitem else []
    found = []
    for at, argument in enumerate(node.target._schema.arguments):
        alias = argument.alias_info
        if alias is not None and (alias.is_write or not of_writes):
            value = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
            found += [each for each in pytree.tree_leaves(value) if isinstance(each, fx.Node)]
    return found


def _is_copy(value: Any) -> bool:
    with as_local():
        return isinstance(value, DTensor) and severed_by(value) is not None


def _refused(what: str) -> ExportError:
    return ExportError(
        f"exported_program: {what} is a view of, along a dim that is split: ranks have a copy. "
        "Give exported_program.run_decompositions({}), in which nothing is written to views; or "
        "split another dim"
    )
