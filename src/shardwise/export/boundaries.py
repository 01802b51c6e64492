"""The modules of an exported program, and the moves of their inputs and outputs.

A program is one flat graph: modules are found by the metadata of nodes and the names of parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from shardwise.core.errors import ExportError
from shardwise.core.mesh import DeviceMesh
from shardwise.dtensor.tensor import DTensor
from shardwise.dtensor.view_copy import link
from shardwise.dtensor.writes import mark_detached_copy
from shardwise.export.annotations import module_path_of
from shardwise.export.operators import Aliases, writes
from shardwise.export.placements import (
    NAME_REMEDY,
    STATE_KINDS,
    Placements,
    ProgramInputs,
    check_placements_fit,
)
from shardwise.parallel.activations import Activations
from shardwise.parallel.plan_spec import (
    apply_spec,
    as_placements,
    check_pattern,
    is_spec,
    join_names,
    matches,
    no_match_error,
)
from shardwise.torch_internals import operator_name

_SIZE = torch.ops.aten.sym_size.int

# ---- modules


@dataclass
class ProgramModule:
    """A module of the exported model, as far as the program still knows it."""

    path: str
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The shapes of its own parameters, buffers and constants, by their names in it."""
    weight_users: list[fx.Node] = field(default_factory=list)
    """The nodes that use its weight: those of its own calls, if it was called."""

    def full_name(self, name: str) -> str:
        """Return the name in the program of one of its own tensors."""
        return join_names(self.path, name)

    def weight_kind(self) -> str | None:
        """Return the kind of its weight, as `parallel.styles.weight_kind`; None without a matrix.

        It is known by the operator that uses it, so that modules like nn.Linear count as such too.
        """
        if len(self.shapes.get("weight", ())) < 2:
            return None
        for user in self.weight_users:
            name = operator_name(user.target)
            if "embedding" in name:
                return "embedding"
            if name.startswith("conv_transpose") or (name == "convolution" and user.args[6]):
                return "transposed"
            if name in ("addmm", "mm", "matmul"):  # x @ weight
                return "transposed"
        return "linear"


def find_modules(program: ExportedProgram) -> dict[str, ProgramModule]:
    """Return the modules that were called or that hold tensors, by path."""
    found: dict[str, ProgramModule] = {}
    for path in _called_paths(program.graph_module):
        found.setdefault(path, ProgramModule(path))
    inputs = ProgramInputs(program)
    for node, _ in inputs.all:
        value = node.meta.get("val")
        for full_name in inputs.state_names.get(node.name, ()):
            path, _, name = full_name.rpartition(".")
            module = found.setdefault(path, ProgramModule(path))
            if isinstance(value, torch.Tensor):
                module.shapes[name] = tuple(map(int, value.shape))
            if name == "weight":
                own = [user for user in node.users if module_path_of(user) == path]
                module.weight_users = own or list(node.users)
    return found


def _called_paths(module: fx.GraphModule) -> Iterator[str]:
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                for path, _ in (node.meta.get("nn_module_stack") or {}).values():
                    yield path


@dataclass
class ModuleCall:
    """One call of a module: its nodes, in order."""

    path: str
    nodes: dict[fx.Node, None] = field(default_factory=dict)

    def inputs(self, state: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
        """Return the tensors that come from outside, each with the nodes of this call that use it.

        Arguments:
            state: the placeholders of parameters, buffers and constants, which are left out.
        """
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

    def outputs(self, updates: set[fx.Node]) -> list[fx.Node]:
        """Return the tensors of this call that nodes outside use, or that the program returns.

        Arguments:
            updates: nodes that the program returns only as new values of its state.
        """
        return [
            node
            for node in self.nodes
            if isinstance(node.meta.get("val"), torch.Tensor)
            and any(
                user not in self.nodes
                and user.target is not _SIZE
                and not (user.op == "output" and node in updates)
                for user in node.users
            )
        ]


def _find_calls(graph: fx.Graph) -> list[ModuleCall]:
    """Return the calls of modules in a graph, outer ones first."""
    found: dict[str, ModuleCall] = {}
    for node in graph.nodes:
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            found.setdefault(key, ModuleCall(path)).nodes[node] = None
    return list(found.values())


def _all_graphs(
    module: fx.GraphModule, state: set[fx.Node]
) -> Iterator[tuple[fx.Graph, set[fx.Node]]]:
    """Yield a program's graph and those of blocks in it, each with the placeholders of state."""
    yield module.graph, state
    for node in module.graph.nodes:
        for at, argument in enumerate(node.args):
            if isinstance(argument, fx.Node) and argument.op == "get_attr":
                block = getattr(module, str(argument.target), None)
                if isinstance(block, fx.GraphModule):
                    inputs = [each for each in block.graph.nodes if each.op == "placeholder"]
                    pairs = zip(inputs, node.args[at + 1 :], strict=False)
                    inner = {placeholder for placeholder, given in pairs if given in state}
                    yield from _all_graphs(block, inner)


# ---- the part of a plan that is about modules


@dataclass(frozen=True)
class Boundary:
    """The specs that the inputs and outputs of a module are moved to; None if they are not moved.

    A spec has a placement for each axis of the mesh, or placements by axis; other axes keep theirs.
    """

    inputs: Any = None
    outputs: Any = None
    named: Mapping[str, Any] = field(default_factory=dict)
    """Specs of inputs of the program, by their names."""


def split_plan(
    plan: Mapping[str, Any], modules: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Boundary]]:
    """Split a plan into specs of tensors, by pattern, and boundaries of modules, by path.

    Arguments:
        modules: the paths of the program's modules.
    """
    tensors: dict[str, Any] = {}
    boundaries: dict[str, Boundary] = {}
    for pattern, wanted in plan.items():
        check_pattern("plan", pattern)
        if not isinstance(wanted, Activations):
            tensors[pattern] = wanted
            continue
        fitting = [path for path in modules if matches(pattern, path)]
        if not fitting:
            raise no_match_error("plan", pattern, modules, "modules", remedy=NAME_REMEDY)
        boundaries |= dict.fromkeys(fitting, _as_boundary(pattern, wanted))
    return tensors, boundaries


def _as_boundary(pattern: str, wanted: Activations) -> Boundary:
    """Return Activations as a boundary, or raise ExportError if a program cannot follow them."""
    inputs, named = wanted.inputs, {}
    if inputs is not None and not is_spec(inputs):
        inputs, named = None, dict(wanted.inputs)
    positions = [key for key in named if not isinstance(key, str)]
    if positions or not (wanted.outputs is None or is_spec(wanted.outputs)):
        what = f"inputs by position {positions}" if positions else f"outputs {wanted.outputs}"
        raise ExportError(
            f"plan[{pattern!r}]: a program does not say which argument or result of a module is "
            f"which, so Activations have one spec there, or names for inputs of the program; got "
            f"{what}. Use the modules in it, input_placements or output_placements"
        )
    return Boundary(inputs, wanted.outputs, named)


# ---- moves


class BoundaryMoves:
    """Redistributes the inputs and outputs of modules (a `tracing.ValueMoves`).

    A tensor moves once. If it is an input of several nested modules, the innermost module decides;
    if it is an output of several, the outermost.

    Arguments:
        program: the original.
        wanted: boundaries by the path of a module.
        mesh: the mesh of all tensors.
    """

    def __init__(
        self,
        program: ExportedProgram,
        wanted: Mapping[str, Boundary],
        mesh: DeviceMesh,
    ) -> None:
        state = {node for node, spec in ProgramInputs(program).all if spec.kind in STATE_KINDS}
        self._mesh = mesh
        self._argument_targets: dict[tuple[fx.Node, fx.Node], _Target] = {}
        """The layouts of arguments, by edge: a node, and the user of it that gets the moved one."""
        self._result_targets: dict[fx.Node, _Target] = {}
        self._cache: dict[tuple[fx.Node, str], tuple[Any, Any]] = {}
        self._updates = _find_updates(program)
        self._linked: set[Any] = set()
        """Nodes and edges whose moved tensor must get all writes to the original, and the other way
        round."""
        for graph, inputs in _all_graphs(program.graph_module, state):
            for call in _find_calls(graph):
                if call.path in wanted:
                    self._add(call, inputs, wanted[call.path])
            if any(map(writes, graph.nodes)):
                aliases = Aliases(graph)
                inside = set(graph.nodes)
                edges = (edge for edge in self._argument_targets if edge[1] in inside)
                self._linked |= {edge for edge in edges if aliases.would_differ_for_user(*edge)}
                ends = inside & self._result_targets.keys()
                self._linked |= {node for node in ends if aliases.would_differ_for_all(node)}

    def _add(self, call: ModuleCall, state: set[fx.Node], boundary: Boundary) -> None:
        """Set the targets of all inputs and outputs of one call of a module."""
        path = call.path or "the module"
        sources = call.inputs(state)
        if boundary.inputs is not None:
            target = self._make_target(f"input of {path}", boundary.inputs)
            if target.splits:
                _check_single(target, sources)
            for source, users in sources.items():
                self._check(target, source)
                self._argument_targets |= {(source, user): target for user in users}
        given = {source.name: source for source in sources if source.op == "placeholder"}
        for name, spec in boundary.named.items():
            if name not in given:
                raise no_match_error(
                    f"inputs of {path}",
                    name,
                    given,
                    "inputs of the program",
                    remedy=f"There are {', '.join(given) or 'none here'}",
                )
            target = self._make_target(f"input {name} of {path}", spec)
            self._check(target, given[name])
            users = sources[given[name]]
            self._argument_targets |= {(given[name], user): target for user in users}
        if boundary.outputs is not None:
            target = self._make_target(f"output of {path}", boundary.outputs)
            results = call.outputs(self._updates)
            _check_single(target, results)
            for result in results:
                self._check(target, result)
                self._result_targets.setdefault(result, target)

    def _make_target(self, what: str, spec: Any) -> _Target:
        return _Target(what, spec, as_placements(spec, self._mesh, what))

    def _check(self, target: _Target, node: fx.Node) -> None:
        """Raise ExportError if the spec splits a dim of a node that cannot be split."""
        name = f"{target.what} ({node.name})"
        check_placements_fit(name, node.meta["val"], target.placements, self._mesh)

    def move_argument(self, node: fx.Node, source: fx.Node, value: Any) -> Any:
        """Return an argument of a node, in the layout that its module asks for."""
        target = self._argument_targets.get((source, node))
        if target is None or not isinstance(value, DTensor):
            return value
        # Moved once for all modules that use it, such as projections to queries, keys and values.
        key = source, repr(target.spec)
        before, moved = self._cache.get(key, (None, None))
        if before is not value:
            moved = target.move(value)
            self._cache[key] = value, moved
        if (source, node) in self._linked:
            _link(moved, value, target)
        return moved

    def move_result(self, node: fx.Node, value: Any) -> Any:
        """Return the result of a node, in the layout that its module asks for."""
        if writes(node):
            self._cache.clear()
        target = self._result_targets.get(node)
        if target is None or not isinstance(value, DTensor):
            return value
        moved = target.move(value)
        if node in self._linked:
            _link(moved, value, target)
        return moved


@dataclass(frozen=True)
class _Target:
    """The spec that a tensor is moved to, and the tensor's name in errors."""

    what: str
    spec: Any
    placements: Placements

    @property
    def splits(self) -> bool:
        return any(each.is_shard() for each in self.placements)

    def move(self, value: DTensor) -> DTensor:
        """Return a value in the layout that the spec asks for: itself if it has it already."""
        layout = apply_spec(value._layout, self.spec, self.what)
        if value._layout == layout:
            return value  # redistribute would record an alias
        moved: DTensor = value.redistribute(
            placements=layout.placements, shard_order=layout.shard_order
        )
        return moved


def _link(moved: DTensor, value: DTensor, target: _Target) -> None:
    """Apply writes to a moved tensor to the original too, and the other way round."""
    if moved is not value:
        mark_detached_copy(moved, "redistribute", ...)
        link(moved, value, target.move)


def _find_updates(program: ExportedProgram) -> set[fx.Node]:
    """Return the nodes that a program returns only as new values of its state or inputs."""
    results: Any = program.graph.output_node().args[0]
    found: dict[bool, set[fx.Node]] = {True: set(), False: set()}
    for spec, result in zip(program.graph_signature.output_specs, results, strict=True):
        if isinstance(result, fx.Node):
            found[spec.kind == OutputKind.USER_OUTPUT].add(result)
    return found[False] - found[True]


def _check_single(target: _Target, nodes: Collection[fx.Node]) -> None:
    """Raise ExportError if a spec could mean any of several tensors."""
    if len(nodes) > 1:
        raise ExportError(
            f"{target.what}: the spec {target.spec} is for one tensor, but there are several "
            f"({', '.join(map(str, nodes))}), and a program does not say which is meant; give "
            "specs to the modules in it that have one"
        )
