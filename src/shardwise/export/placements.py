"""The inputs and outputs of a program, and the placements that a plan gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement, Replicate
from shardwise.export.errors import ExportError
from shardwise.parallel.plan_spec import (
    PlanError,
    as_placements,
    check_pattern,
    check_plan,
    has_axis,
    is_spec,
    join_names,
    matches,
    no_match_error,
)

Placements = list[Placement]

STATE_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
"""The kinds of inputs that a program holds itself."""

NAME_REMEDY = "Correct it, or leave it out: what no pattern matches is whole"
AXIS_REMEDY = "Make the mesh with that axis, or leave it out"


class ProgramInputs:
    """The inputs of a program: parameters, buffers and constants, and those that users pass.

    Arguments:
        program: an exported program.
    """

    def __init__(self, program: ExportedProgram) -> None:
        nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
        self.all: list[tuple[fx.Node, InputSpec]] = list(
            zip(nodes, program.graph_signature.input_specs, strict=True)
        )
        self.state_names = _find_state_names(program, self.all)
        """The names of parameters, buffers and constants, all of a tied one's, by placeholder."""

    @property
    def user_inputs(self) -> list[fx.Node]:
        """The placeholders of the inputs that users pass, in order."""
        return [node for node, spec in self.all if spec.kind == InputKind.USER_INPUT]


def _find_state_names(
    program: ExportedProgram, inputs: Sequence[tuple[fx.Node, InputSpec]]
) -> dict[str, list[str]]:
    state = {**program.state_dict, **program.constants}
    found: dict[str, list[str]] = {}
    for node, spec in inputs:
        if spec.kind in STATE_KINDS and spec.target is not None:
            tensor = state.get(spec.target)
            found[node.name] = [spec.target]
            if isinstance(tensor, torch.Tensor):
                found[node.name] += [
                    name for name, other in state.items() if name != spec.target and other is tensor
                ]
    return found


def placements_by_input(
    inputs: ProgramInputs, mesh: DeviceMesh, plan: Mapping[str, Any], input_placements: Any
) -> dict[str, Placements]:
    """Return the placements that a plan and `input_placements` give to inputs, by placeholder."""
    check_plan(plan)
    chosen: dict[str, Placements] = {}
    tensors = [name for names in inputs.state_names.values() for name in names]
    modules = dict.fromkeys(name.rpartition(".")[0] for name in tensors)
    for pattern, wanted in plan.items():
        check_pattern("plan", pattern)
        if not isinstance(wanted, Placement | Mapping | list | tuple):
            raise PlanError(
                f"plan[{pattern!r}]: expected placements, such as {{{mesh.axis_name(0)!r}: "
                f"Shard(0)}}; got {wanted!r}. Styles are for tensor_parallel_transformation"
            )
        asked = as_placements(wanted, mesh, f"plan[{pattern!r}]", AXIS_REMEDY)
        fitting = [
            placeholder
            for placeholder, names in inputs.state_names.items()
            if any(matches(pattern, name) for name in names)
        ]
        if not fitting:
            kinds = "parameters, buffers or constants"
            meant = f"which is a module: {join_names(pattern, '*')!r} means what it holds"
            raise no_match_error("plan", pattern, tensors, kinds, modules, meant, NAME_REMEDY)
        chosen |= dict.fromkeys(fitting, asked)
    users = [node.name for node in inputs.user_inputs]
    return chosen | _parse_placements("input_placements", input_placements, users, "inputs", mesh)


def as_output_placements(given: Any, values: Sequence[Any], mesh: DeviceMesh) -> list[Placements]:
    """Return the placements of each output that users get; replicated by default.

    Arguments:
        given: the argument `output_placements` of the user's call.
        values: the outputs, as the program's metadata has them.
    """
    replicated: Placements = [Replicate()] * mesh.ndim
    names = [str(at) for at in range(len(values))]
    found = _parse_placements("output_placements", given, names, "outputs", mesh)
    for name, value in zip(names, values, strict=True):
        if name in found:
            check_placements_fit(f"output_placements[{name}]", value, found[name], mesh)
    return [found.get(name, replicated) for name in names]


def _parse_placements(
    argument: str, given: Any, names: list[str], kinds: str, mesh: DeviceMesh
) -> dict[str, Placements]:
    """Return placements by name; they may be given by name, in order with None, or one for all."""
    if given is None:
        return {}
    if _is_for_all(given, names, mesh):
        pairs = [(name, given) for name in names]
    elif isinstance(given, Mapping):
        pairs = [(str(name), each) for name, each in given.items()]
        for name, _ in pairs:
            if name not in names:
                raise no_match_error(argument, name, names, kinds, remedy=f"There are {names}")
    else:
        if not isinstance(given, Sequence) or len(given) != len(names):
            raise ExportError(
                f"{argument}: expected placements for each of {names}, a dict by their names, or "
                f"the same for all, such as {{{mesh.axis_name(0)!r}: Shard(0)}}; got {given!r}"
            )
        pairs = [pair for pair in zip(names, given, strict=True) if pair[1] is not None]
    return {
        name: as_placements(each, mesh, f"{argument}[{name!r}]", AXIS_REMEDY)
        for name, each in pairs
    }


def _is_for_all(given: Any, names: list[str], mesh: DeviceMesh) -> bool:
    """Check whether this is the spec of one tensor, which then counts for all."""
    if isinstance(given, Placement):
        return True
    if not is_spec(given):
        return False
    if not isinstance(given, Mapping):
        return len(given) == mesh.ndim
    axes = [each for each in given if isinstance(each, str) and has_axis(mesh, each)]
    return len(axes) == len(given) and not set(axes) & set(names)


def check_input(name: str, value: Any, placements: Placements, mesh: DeviceMesh) -> None:
    """Raise ExportError for placements that an input cannot have."""
    if any(each.is_partial() for each in placements):
        raise ExportError(f"{name}: expected Shard or Replicate for an input, got {placements}")
    check_placements_fit(name, value, placements, mesh)


def check_placements_fit(name: str, value: Any, placements: Placements, mesh: DeviceMesh) -> None:
    """Raise ExportError for placements that a value of the program cannot have."""
    if not isinstance(value, torch.Tensor):
        raise ExportError(f"{name}: expected a tensor to place, the program has {value!r} there")
    for axis, each in enumerate(placements):
        if not each.is_shard():
            continue
        dim = each.dim  # type: ignore[attr-defined]
        if not -value.dim() <= dim < value.dim():
            raise ExportError(
                f"{name}: expected a dim of a {value.dim()}-d tensor, {list(value.shape)}; "
                f"got {each!r}"
            )
        if isinstance(value.shape[dim], torch.SymInt):
            raise ExportError(
                f"{name}: dim {dim % value.dim()} is dynamic ({value.shape[dim]}), and axis "
                f"{mesh.axis_name(axis)} would split it: ranks could not know the lengths of "
                "each other's pieces. Fix its size at export, or split another dim"
            )
