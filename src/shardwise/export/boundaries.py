"""Where modules begin and end in a graph, and what happens to tensors that cross there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from shardwise.copies import link
from shardwise.dispatch.writes import mark_severed
from shardwise.export.aliases import Aliases
from shardwise.export.cleaning import writes
from shardwise.export.errors import ExportError
from shardwise.export.plan import STATE, Inputs
from shardwise.mesh import DeviceMesh
from shardwise.parallel.names import unmatched
from shardwise.parallel.specs import laid_by, placements_of
from shardwise.placement import Placement, Shard
from shardwise.tensor import DTensor

_SIZE = torch.ops.aten.sym_size.int


@dataclass(frozen=True)
class Boundary:
    """How tensors lie that enter a module, and that leave it; None: as they happen to.

    Each is one placement for each axis of the mesh, or some by axis: others stay as they are.
    """

    entering: Any = None
    leaving: Any = None
    named: Mapping[str, Any] = field(default_factory=dict)
    """For inputs of the program, which have names."""


@dataclass
class Call:
    """One call of a module: its nodes, in order."""

    path: str
    nodes: dict[fx.Node, None] = field(default_factory=dict)

    def entering(self, state: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
        """Tensors from elsewhere, except for parameters and the like; each with its users here."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in self.nodes:
            if node.target is _SIZE:
                continue
            for source in node.all_input_nodes:
                if source in self.nodes or source in state:
                    continue
                if isinstance(source.meta.get("val"), torch.Tensor):
                    found.setdefault(source, []).append(node)
        return found

    def leaving(self, kept: set[fx.Node]) -> list[fx.Node]:
        """Tensors that are used elsewhere.

        Arguments:
            kept: those that the program's output has as what became of its state.
        """
        return [
            node
            for node in self.nodes
            if isinstance(node.meta.get("val"), torch.Tensor)
            and any(
                user not in self.nodes
                and user.target is not _SIZE
                and not (user.op == "output" and node in kept)
                for user in node.users
            )
        ]


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
        program: the original.
        wanted: by the path of a module.
    """

    def __init__(
        self,
        program: ExportedProgram,
        wanted: Mapping[str, Boundary],
        mesh: DeviceMesh,
    ) -> None:
        state = {node for node, spec in Inputs(program).all if spec.kind in STATE}
        self._mesh = mesh
        self._entering: dict[tuple[fx.Node, fx.Node], _Place] = {}
        self._leaving: dict[fx.Node, _Place] = {}
        self._moved: dict[tuple[fx.Node, str], tuple[Any, Any]] = {}
        self._kept = _kept_by(program)
        self._tied: set[Any] = set()
        """Nodes and edges, as above, of which a copy would be told from the tensor itself."""
        for graph, inputs in graphs_of(program.graph_module, state):
            for call in calls_of(graph):
                if call.path in wanted:
                    self._add(call, inputs, wanted[call.path])
            if any(map(writes, graph.nodes)):
                aliases = Aliases(graph)
                inside = set(graph.nodes)
                edges = (edge for edge in self._entering if edge[1] in inside)
                self._tied |= {edge for edge in edges if aliases.is_seen_through(*edge)}
                ends = inside & self._leaving.keys()
                self._tied |= {node for node in ends if aliases.is_seen_behind(node)}

    def _add(self, call: Call, state: set[fx.Node], boundary: Boundary) -> None:
        path = call.path or "the module"
        sources = call.entering(state)
        if boundary.entering is not None:
            place = self._place(f"input of {path}", boundary.entering)
            if place.splits:
                _check_one(place, sources)
            for source, users in sources.items():
                place.check(source)
                self._entering |= {(source, user): place for user in users}
        given = {source.name: source for source in sources if source.op == "placeholder"}
        for name, spec in boundary.named.items():
            if name not in given:
                raise unmatched(
                    f"inputs of {path}",
                    name,
                    given,
                    "inputs of the program",
                    remedy=f"There are {', '.join(given) or 'none here'}",
                )
            place = self._place(f"input {name} of {path}", spec)
            place.check(given[name])
            users = sources[given[name]]
            self._entering |= {(given[name], user): place for user in users}
        if boundary.leaving is not None:
            place = self._place(f"output of {path}", boundary.leaving)
            results = call.leaving(self._kept)
            _check_one(place, results)
            for result in results:
                place.check(result)
                self._leaving.setdefault(result, place)

    def _place(self, what: str, spec: Any) -> _Place:
        return _Place(what, spec, placements_of(spec, self._mesh, what))

    def entering(self, node: fx.Node, source: fx.Node, value: Any) -> Any:
        """What a node gets in place of a value."""
        place = self._entering.get((source, node))
        if place is None or not isinstance(value, DTensor):
            return value
        # Once for all modules that take it, such as the projections to queries, keys and values.
        key = source, repr(place.spec)
        before, moved = self._moved.get(key, (None, None))
        if before is not value:
            moved = place.moved(value)
            self._moved[key] = value, moved
        if (source, node) in self._tied:
            _tie(moved, value, place)
        return moved

    def leaving(self, node: fx.Node, value: Any) -> Any:
        """What others get in place of a node's result."""
        if writes(node):
            self._moved.clear()
        place = self._leaving.get(node)
        if place is None or not isinstance(value, DTensor):
            return value
        moved = place.moved(value)
        if node in self._tied:
            _tie(moved, value, place)
        return moved


@dataclass(frozen=True)
class _Place:
    """Where a tensor goes."""

    what: str
    spec: Any
    placements: Sequence[Placement]

    @property
    def splits(self) -> bool:
        return any(each.is_shard() for each in self.placements)

    def moved(self, value: DTensor) -> DTensor:
        layout = laid_by(value._layout, self.spec, self.what)
        if value._layout == layout:
            return value  # not even an alias is written down
        moved: DTensor = value.redistribute(
            placements=layout.placements, shard_order=layout.shard_order
        )
        return moved

    def check(self, node: fx.Node) -> None:
        """Refuse to split what cannot be split."""
        shape = node.meta["val"].shape
        for placement in self.placements:
            if not isinstance(placement, Shard):
                continue
            if not -len(shape) <= placement.dim < len(shape):
                raise ExportError(
                    f"{self.what}: expected a dim of {node.name}, {len(shape)}-d; got {placement}"
                )
            if isinstance(shape[placement.dim], torch.SymInt):
                raise ExportError(
                    f"{self.what}: dim {placement.dim} of {node.name} is dynamic "
                    f"({shape[placement.dim]}), and {placement} would split it: ranks could not "
                    "know the lengths of each other's pieces. Fix its size at export, or split "
                    "another dim"
                )


def _tie(moved: DTensor, value: DTensor, place: _Place) -> None:
    """Have a tensor that was moved stand for the one it was, for those that write to either."""
    if moved is not value:
        mark_severed(moved, "redistribute", ...)
        link(moved, value, place.moved)


def _kept_by(program: ExportedProgram) -> set[fx.Node]:
    """Nodes that only tell what became of a program's state or inputs."""
    results: Any = program.graph.output_node().args[0]
    found: dict[bool, set[fx.Node]] = {True: set(), False: set()}
    for spec, result in zip(program.graph_signature.output_specs, results, strict=True):
        if isinstance(result, fx.Node):
            found[spec.kind == OutputKind.USER_OUTPUT].add(result)
    return found[False] - found[True]


def _check_one(place: _Place, nodes: Collection[fx.Node]) -> None:
    """Refuse to guess which of several tensors is meant."""
    if len(nodes) > 1:
        raise ExportError(
            f"{place.what}: it should lie as {place.spec}, but there are several "
            f"({', '.join(map(str, nodes))}) and a program does not say which is meant; name the "
            "modules in it that have one"
        )
