"""shard_program: from an exported program to that of one rank."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.export import ExportedProgram, ModuleCallEntry
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

from shardwise import world
from shardwise.comm import Cause
from shardwise.comm.trace import acting
from shardwise.export import cleaning, draws, notes, sizes
from shardwise.export.activations import apart
from shardwise.export.boundaries import Boundaries, Boundary
from shardwise.export.cancelling import Listening
from shardwise.export.cleaning import is_collective, writes
from shardwise.export.errors import ExportError
from shardwise.export.modules import modules_of
from shardwise.export.plan import (
    Inputs,
    Placements,
    check_input,
    output_placements_of,
    placements_by_input,
)
from shardwise.export.polynomials import Sizes
from shardwise.export.recording import RecordingWorld, as_recorded
from shardwise.export.simplifying import simplify
from shardwise.export.tracing import (
    Moves,
    OnDTensors,
    as_dtensor,
    as_piece,
    record,
    without_writes,
)
from shardwise.export.values import constants_of, propagate
from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh, as_mesh
from shardwise.placement import Replicate
from shardwise.tensor import DTensor
from shardwise.torch_internals import FakeTensorMode, pytree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh


def shard_program(
    exported_program: ExportedProgram,
    mesh: DeviceMesh | TorchMesh,
    plan: Mapping[str, Any],
    *,
    input_placements: Any = None,
    output_placements: Any = None,
) -> ExportedProgram:
    """The program of the calling rank: local shapes, explicit collectives, local state.

    Arguments:
        exported_program: of a model in one process; it is not changed.
        mesh: the ranks that will run it. On an abstract mesh, the program of its first rank.
        plan: placements by name patterns of parameters, buffers and constants, as for
            `shardwise.parallel.shard_module`; what no pattern matches is whole on every rank.
            By patterns for modules, `Activations`: how tensors lie that enter and leave them.
        input_placements: of what users give, by name, in order, or the same for all; whole by
            default. A rank is then given its piece.
        output_placements: of what users get, in order, or the same for all; whole by default.

    A program that talks among all ranks runs wherever torch.distributed was started with as many.
    If axes of a mesh of several talk, their groups have to be there: they are in the processes
    that called this; where a program is loaded, `make_groups(program)` makes them, and its
    docstring says how to without shardwise.

    Example:
        >>> program = torch.export.export(model, (x,))
        >>> plan = {"up.weight": [Shard(0)], "down.weight": [Shard(1)]}
        >>> local = shard_program(program, mesh, plan)
        >>> local.module()(x)
    """
    if not isinstance(exported_program, ExportedProgram):
        raise ExportError(
            "exported_program: expected what torch.export.export(model, args) returns, got "
            f"{type(exported_program).__name__}"
        )
    mesh = as_mesh(mesh)
    real, recording = as_recorded(mesh)
    boundaries: dict[str, Boundary] = {}
    if isinstance(plan, Mapping):
        plan, boundaries = apart(plan, modules_of(exported_program))
    moves = Boundaries(exported_program, boundaries, real) if boundaries else None
    return Sharding(
        exported_program, real, recording, plan, input_placements, output_placements, moves
    ).program()


class Sharding:
    """The making of one rank's program.

    Arguments:
        program: the original.
        mesh: the ranks.
        here: the rank that the program is for.
        moves: what may move arguments and results of nodes of the original.
    """

    def __init__(
        self,
        program: ExportedProgram,
        mesh: DeviceMesh,
        here: RecordingWorld,
        plan: Mapping[str, Any],
        input_placements: Any = None,
        output_placements: Any = None,
        moves: Moves | None = None,
    ) -> None:
        self._original, self._mesh, self._here = program, mesh, here
        self._moves: Moves | None = None if moves is None else Listening(moves)
        sizes.check_backed(program)
        self._inputs = Inputs(program)
        self._placements = placements_by_input(self._inputs, mesh, plan, input_placements)
        for node, _ in self._inputs.all:
            if node.name in self._placements:
                name = self._inputs.names.get(node.name, [node.name])[0]
                check_input(name, node.meta.get("val"), self._placements[node.name], mesh)
        self._output_placements = output_placements_of(
            output_placements, _users_outputs(program), mesh
        )
        self._symbols = sizes.symbols_of(program)
        self._whole: Placements = [Replicate()] * mesh.ndim

    # ---- the graph

    def program(self) -> ExportedProgram:
        """Record, clean up, and put together with the local state."""
        module, varying = self._without_pairs(*sizes.recorded(self._recorded, self._symbols))
        graph = module.graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        for (original, _), node in zip(self._inputs.all, placeholders, strict=True):
            node.name = node.target = original.name
            node.meta = {
                **original.meta,
                **{k: v for k, v in node.meta.items() if k in ("layout", "custom")},
            }
        if varying:
            sizes.Emitter(graph, self._original, self._symbols).fill(varying)
        cleaning.clean(graph, torch.device(self._mesh.device_type))
        lifted = self._lifted(module)
        self._propagate(module, lifted)
        simplify(graph)
        return self._assembled(module, lifted)

    def _without_pairs(
        self, module: fx.GraphModule, varying: sizes.Arguments
    ) -> tuple[fx.GraphModule, sizes.Arguments]:
        """What was recorded; or what is without gathers that are undone, if there are any."""
        if not isinstance(self._moves, Listening):
            return module, varying
        self._moves = self._moves.cancelled(self._original.graph.output_node())
        if self._moves is None:
            return module, varying
        again = sizes.recorded(self._recorded, self._symbols)
        before, after = (sum(map(is_collective, each.graph.nodes)) for each in (module, again[0]))
        return again if after <= before else (module, varying)

    def _recorded(self, at: Sizes) -> fx.GraphModule:
        """The local graph at some sizes."""
        layouts: dict[str, Layout] = {}
        inputs: list[Any] = []
        with world.use(self._here):
            for node, spec in self._inputs.all:
                value = node.meta.get("val")
                if isinstance(value, torch.Tensor):
                    shape = [sizes.number(size, at) for size in value.shape]
                    layout = self._layout(node.name, shape)
                    layouts[node.name] = layout
                    value = torch.empty(layout.local_shape(), dtype=value.dtype, device="meta")
                else:
                    value = getattr(spec.arg, "value", value)
                inputs.append(value)
        names = [node.name for node, _ in self._inputs.all]

        def run(*given: Any) -> list[Any]:
            values = [
                as_dtensor(value, layouts[name]) if name in layouts else value
                for name, value in zip(names, given, strict=True)
            ]
            results = OnDTensors(self._original.graph_module, self._moves).run(*values)
            return self._outputs(results, layouts)

        module = record(run, inputs, self._here)
        if self._original.dialect != "TRAINING" and any(map(writes, module.graph.nodes)):
            module = without_writes(module, inputs)
        wanted = [draw for _, draw in draws.of_graph(self._original.graph_module, at)]
        draws.settle(module, wanted, "exported_program")
        placeholders = (node for node in module.graph.nodes if node.op == "placeholder")
        for name, node in zip(names, placeholders, strict=True):
            if name in layouts:
                notes.note_layout(node, layouts[name])
        return module

    def _layout(self, placeholder: str, shape: Sequence[int]) -> Layout:
        placements = self._placements.get(placeholder, self._whole)
        return Layout.from_placements(self._mesh, shape, placements)

    def _outputs(self, results: Any, layouts: dict[str, Layout]) -> list[Any]:
        """The results as this rank returns them: what was written to lies as it did."""
        before = {spec.target or node.name: node.name for node, spec in self._inputs.all}
        wanted = iter(self._output_placements)
        pieces = []
        specs = self._original.graph_signature.output_specs
        for spec, result in zip(specs, results, strict=True):
            placements = next(wanted) if spec.kind == OutputKind.USER_OUTPUT else self._whole
            if isinstance(result, DTensor):
                layout = Layout.from_placements(self._mesh, result.shape, placements)
                if spec.target in before and spec.kind != OutputKind.USER_OUTPUT:
                    layout = layouts[before[spec.target]]
                with acting(Cause("output")):
                    result = as_piece(result, layout)
            pieces.append(result)
        return pieces

    def _lifted(self, module: fx.GraphModule) -> dict[str, torch.Tensor]:
        """Tensors with data that rules made, such as indices, as constants of the program.

        They become inputs, in front of those of users; returned by the names of these.
        """
        found: dict[str, torch.Tensor] = {}
        users = {node.name for node in self._inputs.users}
        first = next(
            node for node in module.graph.nodes if node.op != "placeholder" or node.name in users
        )
        for node, value in constants_of(module, "exported_program").items():
            name = f"c_shardwise_{len(found)}"
            with module.graph.inserting_before(first):
                placeholder = module.graph.placeholder(name)
            found[name] = value.to(self._mesh.device_type)
            node.replace_all_uses_with(placeholder)
            module.graph.erase_node(node)
        return found

    def _propagate(self, module: fx.GraphModule, lifted: Mapping[str, torch.Tensor]) -> None:
        """Give every node its value without data, with symbols where sizes are dynamic."""
        values = {node.name: node.meta.get("val") for node, _ in self._inputs.all}
        modes = filter(None, (getattr(each, "fake_mode", None) for each in values.values()))
        mode = next(modes, None) or FakeTensorMode()
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        given = []
        for node in placeholders:
            if node.name in lifted:
                given.append(mode.from_tensor(lifted[node.name], static_shapes=True))
            else:
                given.append(self._local_value(node.name, values[node.name], mode))
        propagate(module, mode, given)
        for node, value in zip(placeholders, given, strict=True):
            node.meta["val"] = value
        root = self._root_stack()
        for node in module.graph.nodes:
            node.meta.pop("tensor_meta", None)
            if node.op == "call_function":  # what happens between modules is the model's
                node.meta.setdefault("nn_module_stack", root)
        with world.use(self._here):
            notes.finish(module.graph, self._mesh)

    def _root_stack(self) -> dict[str, Any]:
        """What nodes of the original say that are in no module but the model itself."""
        stacks = (node.meta.get("nn_module_stack") for node in self._original.graph.nodes)
        first: dict[str, Any] = next(filter(None, stacks), {})
        return dict([*first.items()][:1])

    def _local_value(self, name: str, value: Any, mode: Any) -> Any:
        """What stands for a rank's piece of an input: its dynamic sizes are those of the whole."""
        if name not in self._placements:
            return value
        known = [size if isinstance(size, int) else 1 for size in value.shape]
        with world.use(self._here):
            local = self._layout(name, known).local_shape()
        sizes_here = [
            here if isinstance(size, int) else size
            for here, size in zip(local, value.shape, strict=True)
        ]
        with mode:
            return torch.empty(sizes_here, dtype=value.dtype, device=value.device)

    # ---- the rest of a program

    def _assembled(
        self, module: fx.GraphModule, lifted: Mapping[str, torch.Tensor]
    ) -> ExportedProgram:
        original = self._original
        signature = original.graph_signature
        specs = {node.name: copy.deepcopy(spec) for node, spec in self._inputs.all}
        for name in lifted:
            argument = TensorArgument(name=name)
            specs[name] = InputSpec(InputKind.CONSTANT_TENSOR, argument, name.removeprefix("c_"))
        inputs = [specs[node.name] for node in module.graph.nodes if node.op == "placeholder"]
        output = module.graph.output_node()
        results: Any = output.args[0]
        output.args = (tuple(results),)
        outputs = list(map(_named, signature.output_specs, results))
        constants = {name.removeprefix("c_"): value for name, value in lifted.items()}
        return ExportedProgram(
            root=module,
            graph=module.graph,
            graph_signature=ExportGraphSignature(inputs, outputs),
            state_dict=self._pieces(original.state_dict),
            range_constraints=copy.deepcopy(original.range_constraints),
            module_call_graph=_module_calls(original),
            example_inputs=self._example(),
            constants={**self._pieces(original.constants), **constants},
            verifiers=original.verifiers,
        )

    def _pieces(self, held: Mapping[str, Any]) -> dict[str, Any]:
        """The local part of parameters, buffers or constants; tied ones stay tied."""
        placed = {
            name: self._placements[placeholder]
            for placeholder, names in self._inputs.names.items()
            if placeholder in self._placements
            for name in names
        }
        made: dict[int, Any] = {}
        result = {}
        for name, value in held.items():
            if name in placed and isinstance(value, torch.Tensor):
                if id(value) not in made:
                    made[id(value)] = self._piece(value, placed[name])
                result[name] = made[id(value)]
            elif isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                # What a program writes to is its own; parameters, which it does not, are shared.
                result[name] = made.setdefault(id(value), value.clone())
            else:
                result[name] = value
        return result

    def _piece(self, value: torch.Tensor, placements: Placements) -> torch.Tensor:
        with world.use(self._here), torch.no_grad():
            layout = Layout.from_placements(self._mesh, value.shape, placements)
            local = layout.piece_of(value.detach()).clone(memory_format=torch.contiguous_format)
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(local, value.requires_grad)
        return local

    def _example(self) -> Any:
        """The example's inputs, as this rank would be given them."""
        if self._original.example_inputs is None:
            return None
        args, kwargs = self._original.example_inputs
        leaves, structure = pytree.tree_flatten((args, kwargs))
        names = [node.name for node in self._inputs.users]
        if len(names) != len(leaves):
            return self._original.example_inputs
        leaves = [
            self._piece(leaf, self._placements[name]) if name in self._placements else leaf
            for name, leaf in zip(names, leaves, strict=True)
        ]
        return pytree.tree_unflatten(leaves, structure)


def _users_outputs(program: ExportedProgram) -> list[Any]:
    """What users get, as the program's metadata has it."""
    results: Any = program.graph.output_node().args[0]
    specs = program.graph_signature.output_specs
    return [
        result.meta.get("val") if isinstance(result, fx.Node) else result
        for spec, result in zip(specs, results, strict=True)
        if spec.kind == OutputKind.USER_OUTPUT
    ]


def _module_calls(program: ExportedProgram) -> list[ModuleCallEntry]:
    """Which modules there are, and how users call the program.

    Signatures of other modules, where export was asked to keep them, name nodes that are no more.
    """
    return [
        ModuleCallEntry(each.fqn, each.signature if each.fqn == "" else None)
        for each in program.module_call_graph
    ]


def _named(spec: OutputSpec, value: Any) -> OutputSpec:
    argument = copy.copy(spec.arg)
    if isinstance(value, fx.Node):
        argument = TensorArgument(name=value.name)
    return OutputSpec(spec.kind, argument, spec.target)
