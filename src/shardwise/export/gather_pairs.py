"""Remove pairs of moves in which the output of a module is gathered and then split again.

While a program is recorded, `GatherObserver` observes how operators move their inputs. If no use of
a gathered value needs more of it than the rank had before, the program is recorded again without
the gather. The decision depends only on layouts at the original's nodes, which are the same on
every rank: no rank leaves out a collective that another runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardwise.core.layout import Layout
from shardwise.dtensor.input_moves import InputMove, is_slice
from shardwise.dtensor.state import state
from shardwise.dtensor.tensor import DTensor
from shardwise.export.operators import writes
from shardwise.export.tracing import ValueMoves

Edge = tuple[fx.Node, fx.Node]
"""A node of the original, and a node that uses its value."""

_READ_NO_DATA = {torch.ops.aten.sym_size.int, torch.ops.aten._assert_tensor_metadata.default}
_CASTS = {torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default}


class GatherObserver:
    """Moves values as another `ValueMoves` does, and observes how operators move them later."""

    def __init__(self, moves: ValueMoves) -> None:
        self._moves = moves
        self._input_moves: list[tuple[Any, InputMove]] = []
        """Moves of inputs by operators, since the last node; dispatch appends to this list."""
        self._given: dict[Edge, Any] = {}
        """The values that nodes were run on."""
        self._wanted: dict[Edge, list[Layout]] = {}
        """The layouts that operators moved these values to."""
        self._argument_moves: dict[Edge, tuple[Layout, Layout]] = {}
        """The layouts of a moved argument, before and after the move."""
        self._result_moves: dict[fx.Node, tuple[Layout, Layout]] = {}
        """The layouts of a moved result, before and after the move."""
        self._shapes: dict[fx.Node, tuple[int, ...]] = {}
        self._cache: dict[tuple[Layout, Edge], bool] = {}

    def move_argument(self, node: fx.Node, source: fx.Node, value: Any) -> Any:
        """Return an argument as the other `ValueMoves` does, and note its layouts."""
        state.move_log = self._input_moves  # the state of this thread
        result = self._moves.move_argument(node, source, value)
        if isinstance(value, DTensor):
            self._given[source, node] = result
            if result is not value:
                self._argument_moves[source, node] = value._layout, result._layout
        return result

    def move_result(self, node: fx.Node, value: Any) -> Any:
        """Return a result as the other `ValueMoves` does, and note its layouts."""
        self._assign_moves(node)
        result = self._moves.move_result(node, value)
        if isinstance(value, DTensor):
            self._shapes[node] = tuple(value.shape)
            if result is not value:
                self._result_moves[node] = value._layout, result._layout
        return result

    def _assign_moves(self, node: fx.Node) -> None:
        """Record the moves since the last node as those of this node's inputs."""
        for tensor, move in self._input_moves:
            for source in node.all_input_nodes:
                if self._given.get((source, node)) is tensor:
                    self._wanted.setdefault((source, node), []).append(move.target)
        self._input_moves.clear()

    def without_pairs(self, output: fx.Node) -> ValueMoves | None:
        """Return the same moves without gathers that are undone; None if there are none.

        Arguments:
            output: the output node of the program, for which the last values were moved.
        """
        self._assign_moves(output)
        not_gathered: set[fx.Node] = set()
        ungathered_uses: set[Edge] = set()
        for node, (before, after) in self._result_moves.items():
            if not _is_gather(before, after) or any(map(writes, node.users)):
                continue
            uses = {(node, user) for user in node.users}
            found = {use for use in uses if self._needs_only(before, use)}
            if found == uses:
                not_gathered.add(node)
            elif not any(map(writes, node.graph.nodes)):  # else the two values could come to differ
                ungathered_uses |= found
        not_moved = {
            use
            for use, (before, after) in self._argument_moves.items()
            if _is_gather(before, after) and not writes(use[1]) and self._takes_only(before, use)
        }
        if not (not_gathered or ungathered_uses or not_moved):
            return None
        return MovesWithoutPairs(self._moves, not_gathered, ungathered_uses, not_moved)

    def _needs_only(self, own: Layout, use: Edge) -> bool:
        """Check whether a use of a gathered value needs no more of it than layout `own` has."""
        if use[1].target in _READ_NO_DATA:
            return True
        if use in self._argument_moves:
            return _is_part(own, self._argument_moves[use][1])
        return self._takes_only(own, use)

    def _takes_only(self, own: Layout, use: Edge) -> bool:
        """Check the same for the operator itself: by its own moves, or those of its users."""
        key = own, use
        if key not in self._cache:
            wanted = self._wanted.get(use)
            if wanted:
                self._cache[key] = all(_is_part(own, each) for each in wanted)
            else:
                self._cache[key] = self._passes_on_only(own, use)
        return self._cache[key]

    def _passes_on_only(self, own: Layout, use: Edge) -> bool:
        """Check the same for a pointwise operator, by the uses of its result."""
        source, node = use
        is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        if writes(node) or not (is_pointwise or node.target in _CASTS):
            return False
        shape = self._shapes.get(node)
        if shape is None or shape != self._shapes.get(source):
            return False
        if node in self._result_moves:
            return _is_part(own, self._result_moves[node][1])
        return all(self._needs_only(own, (node, user)) for user in node.users)


class MovesWithoutPairs:
    """Moves values as another `ValueMoves` does, except for some.

    Arguments:
        not_gathered: nodes whose results are not moved.
        ungathered_uses: uses that get a result as it was before its move; other uses get it moved.
        not_moved: uses whose argument is not moved.
    """

    def __init__(
        self,
        moves: ValueMoves,
        not_gathered: set[fx.Node],
        ungathered_uses: set[Edge],
        not_moved: set[Edge],
    ) -> None:
        self._moves, self._not_gathered = moves, not_gathered
        self._ungathered_uses, self._not_moved = ungathered_uses, not_moved
        self._before: dict[fx.Node, Any] = {}

    def move_argument(self, node: fx.Node, source: fx.Node, value: Any) -> Any:
        """Return an argument as the other `ValueMoves` does, but for the exceptions."""
        use = source, node
        if use in self._ungathered_uses:
            value = self._before[source]
        return value if use in self._not_moved else self._moves.move_argument(node, source, value)

    def move_result(self, node: fx.Node, value: Any) -> Any:
        """Return a result as the other `ValueMoves` does, but for the exceptions."""
        if node in self._not_gathered:
            return value
        self._before[node] = value
        return self._moves.move_result(node, value)


def _is_gather(before: Layout, after: Layout) -> bool:
    """Check whether a move only gathers: each rank then has all it had before."""
    return before is not after and is_slice(after, before)


def _is_part(own: Layout, wanted: Layout) -> bool:
    """Check whether a rank's shard in layout `wanted` is a part of its shard in layout `own`."""
    return len(own.shape) == len(wanted.shape) and is_slice(own, wanted)
