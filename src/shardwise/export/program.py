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

from shardwise.comm import Cause
from shardwise.comm.trace import trace_scope
from shardwise.core import world
from shardwise.core.errors import ExportError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh, as_mesh
from shardwise.core.placement import Replicate
from shardwise.dtensor.tensor import DTensor
from shardwise.export.annotations import (
    annotate_layout,
    find_constants,
    finish_annotations,
    propagate_values,
)
from shardwise.export.boundaries import Boundary, BoundaryMoves, find_modules, split_plan
from shardwise.export.dynamic_sizes import (
    SizeEmitter,
    SymbolSizes,
    VaryingArguments,
    check_backed,
    evaluate_size,
    find_symbols,
    record_at_samples,
)
from shardwise.export.gather_pairs import GatherObserver
from shardwise.export.operators import is_collective, writes
from shardwise.export.placements import (
    Placements,
    ProgramInputs,
    as_output_placements,
    check_input,
    placements_by_input,
)
from shardwise.export.random import find_draws_of_graph, match_draws
from shardwise.export.recording import RecordingWorld, as_recorded
from shardwise.export.simplify import clean, simplify
from shardwise.export.tracing import (
    DTensorInterpreter,
    ValueMoves,
    as_local_shard,
    as_recorded_dtensor,
    record_graph,
    without_writes,
)
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
    """Return the calling rank's program: local shapes, explicit collectives, local state.

    Arguments:
        exported_program: the program of a model in one process; it is not changed.
        mesh: the ranks that will run it. For an abstract mesh, its first rank's program is
            returned.
        plan: placements by name patterns of parameters, buffers and constants, as for
            `shardwise.parallel.shard_module`; without a match a tensor is replicated. `Activations`
            by patterns of modules: the placements of their inputs and outputs.
        input_placements: placements of the inputs that users pass, by name, in order, or the same
            for all; replicated by default. Each rank then passes its local shards.
        output_placements: placements of the outputs that users get, in order, or the same for all;
            replicated by default.

    A program whose collectives are among all ranks runs wherever torch.distributed was started with
    this number of ranks. Collectives along one axis of several need process groups: they exist in
    the processes that called this; where a program is loaded, `make_groups(program)` makes them,
    and its docstring says how to make them without shardwise.

    Example:
        >>> program = torch.export.export(model, (x,))
        >>> plan = {"up.weight": [Shard(0)], "down.weight": [Shard(1)]}
        >>> local = shard_program(program, mesh, plan)
        >>> local.module()(x)
    """
    check_is_program(exported_program)
    mesh = as_mesh(mesh)
    recorded_mesh, recording = as_recorded(mesh)
    boundaries: dict[str, Boundary] = {}
    if isinstance(plan, Mapping):
        plan, boundaries = split_plan(plan, find_modules(exported_program))
    moves = BoundaryMoves(exported_program, boundaries, recorded_mesh) if boundaries else None
    return ProgramSharder(
        exported_program,
        recorded_mesh,
        recording,
        plan,
        input_placements,
        output_placements,
        moves,
    ).program()


def check_is_program(exported_program: Any) -> None:
    """Raise ExportError unless the argument `exported_program` is one."""
    if not isinstance(exported_program, ExportedProgram):
        raise ExportError(
            "exported_program: expected what torch.export.export(model, args) returns, got "
            f"{type(exported_program).__name__}"
        )


class ProgramSharder:
    """Makes one rank's program.

    Arguments:
        program: the original.
        mesh: the ranks, as a mesh in the world `recording`.
        recording: the world of the rank that the program is for.
        plan: placements by name patterns.
        moves: redistributes arguments and results of nodes of the original.
    """

    def __init__(
        self,
        program: ExportedProgram,
        mesh: DeviceMesh,
        recording: RecordingWorld,
        plan: Mapping[str, Any],
        input_placements: Any = None,
        output_placements: Any = None,
        moves: ValueMoves | None = None,
    ) -> None:
        self._original, self._mesh, self._recording = program, mesh, recording
        self._moves: ValueMoves | None = None if moves is None else GatherObserver(moves)
        check_backed(program)
        self._inputs = ProgramInputs(program)
        self._placements = placements_by_input(self._inputs, mesh, plan, input_placements)
        for node, _ in self._inputs.all:
            if node.name in self._placements:
                name = self._inputs.state_names.get(node.name, [node.name])[0]
                check_input(name, node.meta.get("val"), self._placements[node.name], mesh)
        self._output_placements = as_output_placements(
            output_placements, _user_output_values(program), mesh
        )
        self._symbols = find_symbols(program)
        self._replicated: Placements = [Replicate()] * mesh.ndim

    # ---- the graph

    def program(self) -> ExportedProgram:
        """Record the graph, clean it up, and assemble the program with the local state."""
        module, varying = self._remove_gather_pairs(*record_at_samples(self._record, self._symbols))
        graph = module.graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        for (original, _), node in zip(self._inputs.all, placeholders, strict=True):
            node.name = node.target = original.name
            node.meta = {
                **original.meta,
                **{k: v for k, v in node.meta.items() if k in ("layout", "custom")},
            }
        if varying:
            SizeEmitter(graph, self._original, self._symbols).fill(varying)
        clean(graph, torch.device(self._mesh.device_type))
        lifted = self._lift_constants(module)
        self._propagate(module, lifted)
        simplify(graph)
        return self._assemble(module, lifted)

    def _remove_gather_pairs(
        self, module: fx.GraphModule, varying: VaryingArguments
    ) -> tuple[fx.GraphModule, VaryingArguments]:
        """Record again without gathers that are undone, if there are any and if it helps."""
        if not isinstance(self._moves, GatherObserver):
            return module, varying
        self._moves = self._moves.without_pairs(self._original.graph.output_node())
        if self._moves is None:
            return module, varying
        again = record_at_samples(self._record, self._symbols)
        before, after = (sum(map(is_collective, each.graph.nodes)) for each in (module, again[0]))
        return again if after <= before else (module, varying)

    def _record(self, sizes: SymbolSizes) -> fx.GraphModule:
        """Record the local graph at the given sizes."""
        layouts: dict[str, Layout] = {}
        inputs: list[Any] = []
        with world.use(self._recording):
            for node, spec in self._inputs.all:
                value = node.meta.get("val")
                if isinstance(value, torch.Tensor):
                    shape = [evaluate_size(size, sizes) for size in value.shape]
                    layout = self._input_layout(node.name, shape)
                    layouts[node.name] = layout
                    value = torch.empty(layout.local_shape(), dtype=value.dtype, device="meta")
                else:
                    value = getattr(spec.arg, "value", value)
                inputs.append(value)
        names = [node.name for node, _ in self._inputs.all]

        def run(*given: Any) -> list[Any]:
            values = [
                as_recorded_dtensor(value, layouts[name]) if name in layouts else value
                for name, value in zip(names, given, strict=True)
            ]
            results = DTensorInterpreter(self._original.graph_module, self._moves).run(*values)
            return self._local_outputs(results, layouts)

        module = record_graph(run, inputs, self._recording)
        if self._original.dialect != "TRAINING" and any(map(writes, module.graph.nodes)):
            module = without_writes(module, inputs)
        wanted = [draw for _, draw in find_draws_of_graph(self._original.graph_module, sizes)]
        match_draws(module, wanted, "exported_program")
        placeholders = (node for node in module.graph.nodes if node.op == "placeholder")
        for name, node in zip(names, placeholders, strict=True):
            if name in layouts:
                annotate_layout(node, layouts[name])
        return module

    def _input_layout(self, placeholder: str, shape: Sequence[int]) -> Layout:
        placements = self._placements.get(placeholder, self._replicated)
        return Layout.from_placements(self._mesh, shape, placements)

    def _local_outputs(self, results: Any, layouts: dict[str, Layout]) -> list[Any]:
        """Return the local shards of the results; new values of inputs keep the input's layout."""
        placeholders = {spec.target or node.name: node.name for node, spec in self._inputs.all}
        wanted = iter(self._output_placements)
        shards = []
        specs = self._original.graph_signature.output_specs
        for spec, result in zip(specs, results, strict=True):
            placements = next(wanted) if spec.kind == OutputKind.USER_OUTPUT else self._replicated
            if isinstance(result, DTensor):
                layout = Layout.from_placements(self._mesh, result.shape, placements)
                if spec.target in placeholders and spec.kind != OutputKind.USER_OUTPUT:
                    layout = layouts[placeholders[spec.target]]
                with trace_scope(Cause("output")):
                    result = as_local_shard(result, layout)
            shards.append(result)
        return shards

    def _lift_constants(self, module: fx.GraphModule) -> dict[str, torch.Tensor]:
        """Make inputs of the tensors with data that rules made, such as indices.

        They come before the inputs that users pass. Returned by the names of the new inputs.
        """
        found: dict[str, torch.Tensor] = {}
        users = {node.name for node in self._inputs.user_inputs}
        first = next(
            node for node in module.graph.nodes if node.op != "placeholder" or node.name in users
        )
        for node, value in find_constants(module, "exported_program").items():
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
        propagate_values(module, mode, given)
        for node, value in zip(placeholders, given, strict=True):
            node.meta["val"] = value
        root = self._root_module_stack()
        for node in module.graph.nodes:
            node.meta.pop("tensor_meta", None)
            if node.op == "call_function":  # a node between modules belongs to the model itself
                node.meta.setdefault("nn_module_stack", root)
        with world.use(self._recording):
            finish_annotations(module.graph, self._mesh)

    def _root_module_stack(self) -> dict[str, Any]:
        """Return the `nn_module_stack` of a node that is in no module but the model itself."""
        stacks = (node.meta.get("nn_module_stack") for node in self._original.graph.nodes)
        first: dict[str, Any] = next(filter(None, stacks), {})
        return dict([*first.items()][:1])

    def _local_value(self, name: str, value: Any, mode: Any) -> Any:
        """Return the fake tensor of an input's local shard; dynamic dims have the global size."""
        if name not in self._placements:
            return value
        known = [size if isinstance(size, int) else 1 for size in value.shape]
        with world.use(self._recording):
            local = self._input_layout(name, known).local_shape()
        sizes = [
            local_size if isinstance(size, int) else size
            for local_size, size in zip(local, value.shape, strict=True)
        ]
        with mode:
            return torch.empty(sizes, dtype=value.dtype, device=value.device)

    # ---- the rest of a program

    def _assemble(
        self, module: fx.GraphModule, lifted: Mapping[str, torch.Tensor]
    ) -> ExportedProgram:
        """Return the program of a graph, with local state and a signature like the original's."""
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
        outputs = list(map(_rename_output, signature.output_specs, results))
        constants = {name.removeprefix("c_"): value for name, value in lifted.items()}
        return ExportedProgram(
            root=module,
            graph=module.graph,
            graph_signature=ExportGraphSignature(inputs, outputs),
            state_dict=self._shard_state(original.state_dict),
            range_constraints=copy.deepcopy(original.range_constraints),
            module_call_graph=_module_calls(original),
            example_inputs=self._shard_example(),
            constants={**self._shard_state(original.constants), **constants},
            verifiers=original.verifiers,
        )

    def _shard_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the local shards of parameters, buffers or constants; tied ones stay tied."""
        placements = {
            name: self._placements[placeholder]
            for placeholder, names in self._inputs.state_names.items()
            if placeholder in self._placements
            for name in names
        }
        made: dict[int, Any] = {}
        result = {}
        for name, value in state.items():
            if name in placements and isinstance(value, torch.Tensor):
                if id(value) not in made:
                    made[id(value)] = self._shard(value, placements[name])
                result[name] = made[id(value)]
            elif isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                # A program may write to buffers, so it gets copies; it shares parameters.
                result[name] = made.setdefault(id(value), value.clone())
            else:
                result[name] = value
        return result

    def _shard(self, value: torch.Tensor, placements: Placements) -> torch.Tensor:
        with world.use(self._recording), torch.no_grad():
            layout = Layout.from_placements(self._mesh, value.shape, placements)
            local = layout.piece_of(value.detach()).clone(memory_format=torch.contiguous_format)
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(local, value.requires_grad)
        return local

    def _shard_example(self) -> Any:
        """Return the local shards of the example's inputs."""
        if self._original.example_inputs is None:
            return None
        args, kwargs = self._original.example_inputs
        leaves, structure = pytree.tree_flatten((args, kwargs))
        names = [node.name for node in self._inputs.user_inputs]
        if len(names) != len(leaves):
            return self._original.example_inputs
        leaves = [
            self._shard(leaf, self._placements[name]) if name in self._placements else leaf
            for name, leaf in zip(names, leaves, strict=True)
        ]
        return pytree.tree_unflatten(leaves, structure)


def _user_output_values(program: ExportedProgram) -> list[Any]:
    """Return the outputs that users get, as the program's metadata has them."""
    results: Any = program.graph.output_node().args[0]
    specs = program.graph_signature.output_specs
    return [
        result.meta.get("val") if isinstance(result, fx.Node) else result
        for spec, result in zip(specs, results, strict=True)
        if spec.kind == OutputKind.USER_OUTPUT
    ]


def _module_calls(program: ExportedProgram) -> list[ModuleCallEntry]:
    """Return the program's modules, with the signature of the program itself only.

    Signatures of other modules, if export was asked to keep them, name nodes that do not exist now.
    """
    return [
        ModuleCallEntry(each.fqn, each.signature if each.fqn == "" else None)
        for each in program.module_call_graph
    ]


def _rename_output(spec: OutputSpec, value: Any) -> OutputSpec:
    """Return the spec of an output with the name of its new node."""
    argument = copy.copy(spec.arg)
    if isinstance(value, fx.Node):
        argument = TensorArgument(name=value.name)
    return OutputSpec(spec.kind, argument, spec.target)
