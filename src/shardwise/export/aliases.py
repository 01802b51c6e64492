"""Which nodes of a graph share memory, as far as can be told without running it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardwise.export.operators import STATISTICS, updates_statistics
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
"""Although their schemas do not say so; dropout when it does nothing."""


def seen_by(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Which arguments a node's result may be a view of, and which it writes to."""
    target = node.target
    if not isinstance(target, OpOverload):
        return node.all_input_nodes, []
    if target is _aten.detach_.default:  # it leaves the numbers alone
        return node.all_input_nodes, []
    if target in _MAY_RETURN_ARGUMENTS:
        return node.all_input_nodes, []
    seen, written = [], []
    hidden = STATISTICS if updates_statistics(target, node.args, node.kwargs) else ()
    for at, argument in enumerate(schema_of(target).arguments):
        value = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
        nodes = [each for each in pytree.tree_leaves(value) if isinstance(each, fx.Node)]
        alias = argument.alias_info
        seen += nodes if alias is not None else []
        if argument.name in hidden or (alias is not None and alias.is_write):
            written += nodes
    return seen, written


class Aliases:
    """The memory of a graph's nodes, and who writes to it.

    Arguments:
        graph: what its placeholders hold is known to those outside.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.origins: dict[fx.Node, set[fx.Node]] = {}
        """Nodes whose memory the result of a node may share, itself among them."""
        self.writers: dict[fx.Node, set[fx.Node]] = {}
        """Of an origin, the nodes that write to its memory."""
        self._place = {node: at for at, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            seen, written = seen_by(node)
            self.origins[node] = {node}.union(*(self.origins[each] for each in seen))
            for each in written:
                for origin in self.origins[each]:
                    self.writers.setdefault(origin, set()).add(node)

    def is_written(self, node: fx.Node) -> bool:
        """Whether anybody writes to the memory of a node."""
        return any(each in self.writers for each in self.origins[node])

    def is_seen_through(self, source: fx.Node, user: fx.Node) -> bool:
        """Whether a user that got a copy of another's result would be told from one that did not.

        It would if it writes to it or hands it on, somebody writes to it from then on, and it is
        still used beside the copy.
        """
        if all(source not in each for each in seen_by(user)):
            return False
        return self._is_written_since(source, user) and self._is_used_beside(source, user)

    def is_seen_behind(self, node: fx.Node) -> bool:
        """Whether it would be told if all users of a node got a copy of its result."""
        return self._is_written_since(node, node.next) and self._is_used_beside(node, node)

    def _is_written_since(self, node: fx.Node, since: fx.Node) -> bool:
        writers = (self.writers.get(each, ()) for each in self.origins[node])
        return any(self._place[each] >= self._place[since] for found in writers for each in found)

    def _is_used_beside(self, node: fx.Node, copied: fx.Node) -> bool:
        """Whether anything that shares a node's memory, but is not made of `copied`, is used."""
        return any(
            other.op == "placeholder"
            or any(self._place[user] > self._place[copied] for user in other.users)
            for other, origins in self.origins.items()
            if copied not in origins and not self.origins[node].isdisjoint(origins)
        )
