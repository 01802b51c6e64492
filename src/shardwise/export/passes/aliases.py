"""Which nodes of a graph share memory, as far as their schemas tell."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardwise.export.operators import RUNNING_STATISTICS, updates_statistics
from shardwise.torch_internals import OpOverload, pytree, schema_of

_aten: Any = torch.ops.aten

_MAY_RETURN_ARGUMENTS: set[Any] = {
    _aten.dropout.default,
    _aten.feature_dropout.default,
    _aten.alpha_dropout.default,
    _aten.feature_alpha_dropout.default,
    _aten.type_as.default,
    _aten.meshgrid.default,
    _aten.meshgrid.indexing,
    _aten.broadcast_tensors.default,
    _aten.atleast_1d.default,
    _aten.atleast_2d.default,
    _aten.atleast_3d.default,
    _aten.einsum.default,
}
"""Operators that may return an argument, as dropout in evaluation, against their schemas."""


def viewed_and_written(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the arguments that a node's result may be a view of, and those that it writes to."""
    target = node.target
    if not isinstance(target, OpOverload):
        return node.all_input_nodes, []
    if target is _aten.detach_.default:  # its schema says that it writes, but values stay the same
        return node.all_input_nodes, []
    if target in _MAY_RETURN_ARGUMENTS:
        return node.all_input_nodes, []
    viewed, written = [], []
    hidden = RUNNING_STATISTICS if updates_statistics(target, node.args, node.kwargs) else ()
    for at, argument in enumerate(schema_of(target).arguments):
        value = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
        nodes = [each for each in pytree.tree_leaves(value) if isinstance(each, fx.Node)]
        alias = argument.alias_info
        viewed += nodes if alias is not None else []
        if argument.name in hidden or (alias is not None and alias.is_write):
            written += nodes
    return viewed, written


class Aliases:
    """The memory that the nodes of a graph share, and the nodes that write to it.

    Arguments:
        graph: any graph; the caller of the graph can read the memory of its placeholders.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.origins: dict[fx.Node, set[fx.Node]] = {}
        """For each node, all nodes whose memory its result may share, itself included."""
        self.writers: dict[fx.Node, set[fx.Node]] = {}
        """For each origin, the nodes that write to its memory."""
        self._output = graph.output_node()
        self._position = {node: at for at, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            viewed, written = viewed_and_written(node)
            self.origins[node] = {node}.union(*(self.origins[each] for each in viewed))
            for each in written:
                for origin in self.origins[each]:
                    self.writers.setdefault(origin, set()).add(node)

    def is_written(self, node: fx.Node) -> bool:
        """Check whether any node writes to the memory of a node."""
        return any(each in self.writers for each in self.origins[node])

    def is_returned(self, node: fx.Node) -> bool:
        """Check whether the caller of the graph may get the memory of a node."""
        return node in self.origins[self._output]

    def would_differ_for_user(self, source: fx.Node, user: fx.Node) -> bool:
        """Check whether results would change if one user of a node got a copy of its value.

        They would if the user writes to the value or returns a view of it, some node writes to this
        memory from then on, and the original is still read beside the copy.
        """
        if all(source not in each for each in viewed_and_written(user)):
            return False
        return self._is_written_since(source, user) and self._is_used_beside(source, user)

    def would_differ_for_all(self, node: fx.Node) -> bool:
        """Check whether results would change if all users of a node got a copy of its value."""
        return self._is_written_since(node, node.next) and self._is_used_beside(node, node)

    def _is_written_since(self, node: fx.Node, since: fx.Node) -> bool:
        writers = (self.writers.get(each, ()) for each in self.origins[node])
        start = self._position[since]
        return any(self._position[each] >= start for found in writers for each in found)

    def _is_used_beside(self, node: fx.Node, copied: fx.Node) -> bool:
        """Check whether nodes that share memory with `node`, but not `copied`, are used later."""
        return any(
            other.op == "placeholder"
            or any(self._position[user] > self._position[copied] for user in other.users)
            for other, origins in self.origins.items()
            if copied not in origins and not self.origins[node].isdisjoint(origins)
        )
