"""Gathers that the next operator undoes: a module's result is made whole, and split again.

Which uses of a gathered tensor take no more of it than the rank had is heard while a program is
recorded, and then it is recorded again without these pairs. All that counts are layouts at the
original's nodes, which every rank sees alike: none of them leaves out what another waits for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardwise.dispatch.moving import InputMove, is_slice
from shardwise.dispatch.state import state
from shardwise.export.cleaning import writes
from shardwise.export.tracing import Moves
from shardwise.layout import Layout
from shardwise.tensor import DTensor

Edge = tuple[fx.Node, fx.Node]
"""A node of the original, and one that uses its value."""

_NO_DATA = {torch.ops.aten.sym_size.int, torch.ops.aten._assert_tensor_metadata.default}
_CASTS = {torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default}


class Listening:
    """Moves tensors as another does, and hears what becomes of them (see `tracing.Moves`)."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._heard: list[tuple[Any, InputMove]] = []
        self._given: dict[Edge, Any] = {}
        self._wanted: dict[Edge, list[Layout]] = {}
        """What operators had values moved to."""
        self._entered: dict[Edge, tuple[Layout, Layout]] = {}
        self._left: dict[fx.Node, tuple[Layout, Layout]] = {}
        """How values lay before and after they were moved."""
        self._shapes: dict[fx.Node, tuple[int, ...]] = {}
        self._known: dict[tuple[Layout, Edge], bool] = {}

    def entering(self, node: fx.Node, source: fx.Node, value: Any) -> Any:
        """What a node gets in place of the value of another."""
        state.heard = self._heard  # of this thread
        result = self._moves.entering(node, source, value)
        if isinstance(value, DTensor):
            self._given[source, node] = result
            if result is not value:
                self._entered[source, node] = value._layout, result._layout
        return result

    def leaving(self, node: fx.Node, value: Any) -> Any:
        """What others get in place of a node's result."""
        self._hear(node)
        result = self._moves.leaving(node, value)
        if isinstance(value, DTensor):
            self._shapes[node] = tuple(value.shape)
            if result is not value:
                self._left[node] = value._layout, result._layout
        return result

    def _hear(self, node: fx.Node) -> None:
        """What was moved since the last time was moved for this node."""
        for tensor, how in self._heard:
            for source in node.all_input_nodes:
                if self._given.get((source, node)) is tensor:
                    self._wanted.setdefault((source, node), []).append(how.target)
        self._heard.clear()

    def cancelled(self, output: fx.Node) -> Moves | None:
        """The same without pairs that cancel; None if there are none.

        Arguments:
            output: of the program, for which results were moved last.
        """
        self._hear(output)
        own: set[Edge] = set()
        dropped: set[fx.Node] = set()
        for node, (before, after) in self._left.items():
            if not _gathers(before, after) or any(map(writes, node.users)):
                continue
            uses = {(node, user) for user in node.users}
            found = {use for use in uses if self._is_within(before, use)}
            if found == uses:
                dropped.add(node)
            elif not any(map(writes, node.graph.nodes)):  # then both have the same for good
                own |= found
        stays = {
            use
            for use, (before, after) in self._entered.items()
            if _gathers(before, after) and not writes(use[1]) and self._takes(before, use)
        }
        return Cancelled(self._moves, dropped, own, stays) if dropped or own or stays else None

    def _is_within(self, own: Layout, use: Edge) -> bool:
        """Whether a use of a gathered tensor needs no more of it than `own`."""
        if use[1].target in _NO_DATA:
            return True
        if use in self._entered:
            return _is_part(own, self._entered[use][1])
        return self._takes(own, use)

    def _takes(self, own: Layout, use: Edge) -> bool:
        """Whether an operator does, as it moves its input, or as those do that use its result."""
        key = own, use
        if key not in self._known:
            wanted = self._wanted.get(use)
            if wanted:
                self._known[key] = all(_is_part(own, each) for each in wanted)
            else:
                self._known[key] = self._hands_on(own, use)
        return self._known[key]

    def _hands_on(self, own: Layout, use: Edge) -> bool:
        source, node = use
        is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        if writes(node) or not (is_pointwise or node.target in _CASTS):
            return False
        shape = self._shapes.get(node)
        if shape is None or shape != self._shapes.get(source):
            return False
        if node in self._left:
            return _is_part(own, self._left[node][1])
        return all(self._is_within(own, (node, user)) for user in node.users)


class Cancelled:
    """Moves tensors as another does, but not to and fro (see `tracing.Moves`).

    Arguments:
        dropped: nodes whose results stay as they are.
        own: uses of results that lie, for others, as they leave.
        stays: uses of what stays as it is where it enters.
    """

    def __init__(
        self, moves: Moves, dropped: set[fx.Node], own: set[Edge], stays: set[Edge]
    ) -> None:
        self._moves, self._dropped, self._own, self._stays = moves, dropped, own, stays
        self._before: dict[fx.Node, Any] = {}

    def entering(self, node: fx.Node, source: fx.Node, value: Any) -> Any:
        """What a node gets in place of the value of another."""
        use = source, node
        if use in self._own:
            value = self._before[source]
        return value if use in self._stays else self._moves.entering(node, source, value)

    def leaving(self, node: fx.Node, value: Any) -> Any:
        """What others get in place of a node's result."""
        if node in self._dropped:
            return value
        self._before[node] = value
        return self._moves.leaving(node, value)


def _gathers(before: Layout, after: Layout) -> bool:
    return before is not after and is_slice(after, before)


def _is_part(own: Layout, wanted: Layout) -> bool:
    return len(own.shape) == len(wanted.shape) and is_slice(own, wanted)
