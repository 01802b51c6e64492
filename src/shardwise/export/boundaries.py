"""Where modules begin and end in a graph, and what happens to tensors that cross there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from shardwise.export.cleaning import writes
from shardwise.export.errors import ExportError
from shardwise.layout import Layout
from shardwise.placement import Placement, Shard
from shardwise.tensor import DTensor


@dataclass(frozen=True)
class Boundary:
    """How tensors lie that enter a module, and that leave it; None: as they happen to."""

    entering: Placement | None = None
    leaving: Placement | None = None


@dataclass
class Call:
    """One call of a module: its nodes, in order."""

    path: str
    nodes: dict[fx.Node, None] = field(default_factory=dict)

    def entering(self, state: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
        """Tensors from elsewhere, except for parameters and the like; each with its users here."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in self.nodes:
            for source in node.all_input_nodes:
                if source in self.nodes or source in state:
                    continue
                if isinstance(source.meta.get("val"), torch.Tensor):
                    found.setdefault(source, []).append(node)
        return found

    def leaving(self) -> fx.Node | None:
        """The last tensor that is used elsewhere."""
        used = (
            node
            for node in reversed(self.nodes)
            if isinstance(node.meta.get("val"), torch.Tensor)
            and any(user not in self.nodes for user in node.users)
        )
        return next(used, None)


def calls_of(graph: fx.Graph) -> list[Call]:
    """The calls of modules in a graph, outer ones first."""
    found: dict[str, Call] = {}
    for node in graph.nodes:
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            found.setdefault(key, Call(path)).nodes[node] = None
    return list(found.values())


def graphs_of(module: fx.GraphModule, state: set[fx.Node]) -> Iterator[tuple[fx.Graph, set[Any]]]:
    """A program's graph and those of blocks in it, each with its inputs that are state."""
    yield module.graph, state
    for node in module.graph.nodes:
        for at, argument in enumerate(node.args):
            if isinstance(argument, fx.Node) and argument.op == "get_attr":
                block = getattr(module, str(argument.target), None)
                if isinstance(block, fx.GraphModule):
                    inputs = [each for each in block.graph.nodes if each.op == "placeholder"]
                    pairs = zip(inputs, node.args[at + 1 :], strict=False)
                    inner = {mine for mine, given in pairs if given in state}
                    yield from graphs_of(block, inner)


class Boundaries:
    """Moves tensors where they enter and leave modules (see `tracing.Moves`).

    Of nested modules, where a tensor enters several at once the innermost is asked, and where it
    leaves several the outermost: it moves once.

    Arguments:
        module: the program's.
        state: its inputs that are parameters, buffers or constants.
        wanted: by the path of a module.
    """

    def __init__(
        self, module: fx.GraphModule, state: set[fx.Node], wanted: Mapping[str, Boundary]
    ) -> None:
        self._entering: dict[tuple[fx.Node, fx.Node], Placement] = {}
        self._leaving: dict[fx.Node, Placement] = {}
        self._moved: dict[tuple[fx.Node, Placement], tuple[Any, Any]] = {}
        for graph, inputs in graphs_of(module, state):
            for call in calls_of(graph):
                if call.path in wanted:
                    self._add(call, inputs, wanted[call.path])

    def _add(self, call: Call, state: set[fx.Node], boundary: Boundary) -> None:
        if boundary.entering is not None:
            sources = call.entering(state)
            if len(sources) > 1 and isinstance(boundary.entering, Shard):
                raise ExportError(
                    f"{call.path or 'the module'}: its input should lie as {boundary.entering}, "
                    f"but several tensors enter ({', '.join(map(str, sources))}) and a program "
                    "does not say which is meant; name the modules in it that take one"
                )
            for source, users in sources.items():
                _check(f"input of {call.path}", source, boundary.entering)
                self._entering |= {(source, user): boundary.entering for user in users}
        last = call.leaving() if boundary.leaving is not None else None
        if last is not None and boundary.leaving is not None:
            _check(f"output of {call.path}", last, boundary.leaving)
            self._leaving.setdefault(last, boundary.leaving)

    def entering(self, node: fx.Node, source: fx.Node, value: Any) -> Any:
        """What a node gets in place of a value."""
        placement = self._entering.get((source, node))
        if placement is None or not isinstance(value, DTensor):
            return value
        # Once for all modules that take it, such as the projections to queries, keys and values.
        before, moved = self._moved.get((source, placement), (None, None))
        if before is not value:
            moved = _moved(value, placement)
            self._moved[source, placement] = value, moved
        return moved

    def leaving(self, node: fx.Node, value: Any) -> Any:
        """What others get in place of a node's result."""
        if writes(node):
            self._moved.clear()
        placement = self._leaving.get(node)
        if placement is None or not isinstance(value, DTensor):
            return value
        return _moved(value, placement)


def _moved(value: DTensor, placement: Placement) -> DTensor:
    layout = Layout.from_placements(value._layout.mesh, value.shape, [placement])
    if value._layout == layout:
        return value  # not even an alias is written down
    moved: DTensor = value.redistribute(placements=[placement])
    return moved


def _check(what: str, node: fx.Node, placement: Placement) -> None:
    """Refuse to split what cannot be split."""
    if not isinstance(placement, Shard):
        return
    shape = node.meta["val"].shape
    if not -len(shape) <= placement.dim < len(shape):
        raise ExportError(f"{what}: expected a dim of {node.name}, {len(shape)}-d; got {placement}")
    if isinstance(shape[placement.dim], torch.SymInt):
        raise ExportError(
            f"{what}: dim {placement.dim} of {node.name} is dynamic ({shape[placement.dim]}), and "
            f"{placement} would split it: ranks could not know the lengths of each other's "
            "pieces. Fix its size at export, or split another dim"
        )
