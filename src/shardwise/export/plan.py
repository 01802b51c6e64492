"""What a plan says of a program: how each of its inputs lies on the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from shardwise.export.errors import ExportError
from shardwise.mesh import DeviceMesh
from shardwise.parallel.names import PlanError, check_pattern, joined, matches, unmatched
from shardwise.parallel.specs import has_axis, is_spec, placements_of
from shardwise.placement import Placement, Replicate

STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)

Placements = list[Placement]

NO_NAME = "Correct it, or leave it out: what no pattern matches is whole"
NO_AXIS = "Make the mesh with that axis, or leave it out"


class Inputs:
    """The inputs of a program: parameters, buffers, constants, and what users give.

    Arguments:
        program: an exported program.
    """

    def __init__(self, program: ExportedProgram) -> None:
        nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
        self.all: list[tuple[fx.Node, InputSpec]] = list(
            zip(nodes, program.graph_signature.input_specs, strict=True)
        )
        self.names = _names(program, self.all)
        """The names of parameters, buffers and constants, tied ones too, by placeholder."""

    @property
    def users(self) -> list[fx.Node]:
        """What users give, in order."""
        return [node for node, spec in self.all if spec.kind == InputKind.USER_INPUT]


def _names(
    program: ExportedProgram, inputs: Sequence[tuple[fx.Node, InputSpec]]
) -> dict[str, list[str]]:
    held = {**program.state_dict, **program.constants}
    found: dict[str, list[str]] = {}
    for node, spec in inputs:
        if spec.kind in STATE and spec.target is not None:
            tensor = held.get(spec.target)
            found[node.name] = [spec.target]
            if isinstance(tensor, torch.Tensor):
                found[node.name] += [
                    name for name, other in held.items() if name != spec.target and other is tensor
                ]
    return found


def placements_by_input(
    inputs: Inputs, mesh: DeviceMesh, plan: Mapping[str, Any], input_placements: Any
) -> dict[str, Placements]:
    """The placements that a plan, and those given for users' inputs, name; by placeholder."""
    if not isinstance(plan, Mapping):
        raise PlanError(f"plan: expected a dict of patterns, got {type(plan).__name__}")
    chosen: dict[str, Placements] = {}
    everything = [name for names in inputs.names.values() for name in names]
    modules = dict.fromkeys(name.rpartition(".")[0] for name in everything)
    for pattern, wanted in plan.items():
        check_pattern("plan", pattern)
        if not isinstance(wanted, Placement | Mapping | list | tuple):
            raise PlanError(
                f"plan[{pattern!r}]: expected placements, such as {{{mesh.axis_name(0)!r}: "
                f"Shard(0)}}; got {wanted!r}. Styles are for tensor_parallel_transformation"
            )
        asked = placements_of(wanted, mesh, f"plan[{pattern!r}]", NO_AXIS)
        fitting = [
            placeholder
            for placeholder, names in inputs.names.items()
            if any(matches(pattern, name) for name in names)
        ]
        if not fitting:
            kinds = "parameters, buffers or constants"
            meant = f"which is a module: {joined(pattern, '*')!r} means what it holds"
            raise unmatched("plan", pattern, everything, kinds, modules, meant, NO_NAME)
        chosen |= dict.fromkeys(fitting, asked)
    users = [node.name for node in inputs.users]
    return chosen | _given("input_placements", input_placements, users, "inputs", mesh)


def _given(
    argument: str, given: Any, names: list[str], kinds: str, mesh: DeviceMesh
) -> dict[str, Placements]:
    """Placements by name, in order with None for what is whole, or the same for all."""
    if given is None:
        return {}
    if _is_for_all(given, names, mesh):
        pairs = [(name, given) for name in names]
    elif isinstance(given, Mapping):
        pairs = [(str(name), each) for name, each in given.items()]
        for name, _ in pairs:
            if name not in names:
                raise unmatched(argument, name, names, kinds, remedy=f"There are {names}")
    else:
        if not isinstance(given, Sequence) or len(given) != len(names):
            raise ExportError(
                f"{argument}: expected placements for each of {names}, a dict by their names, or "
                f"the same for all, such as {{{mesh.axis_name(0)!r}: Shard(0)}}; got {given!r}"
            )
        pairs = [pair for pair in zip(names, given, strict=True) if pair[1] is not None]
    return {
        name: placements_of(each, mesh, f"{argument}[{name!r}]", NO_AXIS) for name, each in pairs
    }


def _is_for_all(given: Any, names: list[str], mesh: DeviceMesh) -> bool:
    """Whether this says how one tensor lies, and so how all do."""
    if isinstance(given, Placement):
        return True
    if not is_spec(given):
        return False
    if not isinstance(given, Mapping):
        return len(given) == mesh.ndim
    axes = [each for each in given if isinstance(each, str) and has_axis(mesh, each)]
    return len(axes) == len(given) and not set(axes) & set(names)


def output_placements_of(given: Any, values: Sequence[Any], mesh: DeviceMesh) -> list[Placements]:
    """The placements of each of the users' outputs; whole by default.

    Arguments:
        values: the outputs, as the program's metadata has them.
    """
    whole: Placements = [Replicate()] * mesh.ndim
    names = [str(at) for at in range(len(values))]
    found = _given("output_placements", given, names, "outputs", mesh)
    for name, value in zip(names, values, strict=True):
        if name in found:
            check_fits(f"output_placements[{name}]", value, found[name], mesh)
    return [found.get(name, whole) for name in names]


def check_input(name: str, value: Any, placements: Placements, mesh: DeviceMesh) -> None:
    """Refuse placements that an input cannot have."""
    if any(each.is_partial() for each in placements):
        raise ExportError(f"{name}: expected Shard or Replicate for an input, got {placements}")
    check_fits(name, value, placements, mesh)


def check_fits(name: str, value: Any, placements: Placements, mesh: DeviceMesh) -> None:
    """Refuse placements that a tensor of the program cannot have."""
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
