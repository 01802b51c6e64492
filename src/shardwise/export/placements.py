"""The inputs and outputs of a program or of a training step, and their placements by a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from shardwise.core.errors import ExportError
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement, Replicate
from shardwise.parallel.activations import Activations
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
from shardwise.torch_internals import pytree

Placements = list[Placement]

STATE_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
"""The kinds of inputs that a program holds itself."""

NAME_REMEDY = "Correct it, or leave it out: tensors that no pattern matches are replicated"
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


# ---- the arguments of a training step


@dataclass(frozen=True)
class StepLeaf:
    """A leaf of the arguments: a tensor, or another value, which is a constant of the step."""

    name: str
    value: Any
    container: str
    """The first key on the path to it, for a leaf of the state; empty for others."""

    @property
    def is_tensor(self) -> bool:
        """Whether it is an input of the graph, not a constant."""
        return isinstance(self.value, torch.Tensor)


@dataclass(frozen=True)
class StepArgument:
    """One argument of a training step: its name, leaves and tree structure."""

    name: str
    leaves: tuple[StepLeaf, ...]
    structure: Any

    def flatten(self, tree: Any, what: str = "") -> list[Any]:
        """Return the leaves of a tree, or raise ExportError if it is not like the example's.

        Arguments:
            what: the name of the tree in the error; that of this argument by default.
        """
        leaves, structure = pytree.tree_flatten(tree)
        if structure != self.structure:
            raise ExportError(
                f"{what or self.name}: expected a tree like the example's, "
                f"{_format_structure(self.structure)}; got {_format_structure(structure)}"
            )
        return leaves


def _format_structure(structure: Any) -> str:
    return " ".join(str(structure).split())


def name_arguments(fn: Callable[..., Any], example: Sequence[Any]) -> list[StepArgument]:
    """Return the arguments of a step with the names that `fn` has for them, and named leaves.

    Leaves of the first argument, the state, are named by their keys in it:
    `params.layers.0.weight`. Those of other arguments begin with the name of the argument:
    `batch.tokens`.
    """
    if not isinstance(example, tuple | list) or not example:
        raise ExportError(
            "example: expected a tuple of the arguments of fn, the state first; got "
            f"{type(example).__name__}"
        )
    names = _argument_names(fn, example)
    found: list[StepArgument] = []
    seen: set[str] = set()
    for at, (name, tree) in enumerate(zip(names, example, strict=True)):
        pairs, structure = pytree.tree_flatten_with_path(tree)
        leaves = []
        for path, value in pairs:
            keys = [_format_key(entry) for entry in path]
            full = ".".join(keys if at == 0 else [name, *keys]) or name
            if full in seen:
                raise ExportError(
                    f"example: expected leaves with different names, got {full!r} twice; the keys "
                    "of the state should differ from the names of the other arguments"
                )
            seen.add(full)
            if isinstance(value, nn.Module):
                raise ExportError(
                    f"{full}: expected tensors, got a module, {type(value).__name__}. The state is "
                    "such as dict(model.named_parameters()), which fn uses by "
                    "torch.func.functional_call(model, state, args)"
                )
            leaves.append(StepLeaf(full, value, keys[0] if at == 0 and keys else ""))
        found.append(StepArgument(name, tuple(leaves), structure))
    return found


def _argument_names(fn: Callable[..., Any], example: Sequence[Any]) -> list[str]:
    try:
        bound = inspect.signature(fn).bind(*example)
    except TypeError as error:
        raise ExportError(f"example: expected the arguments of fn; {error}") from None
    except ValueError:  # a callable without a signature
        return [f"arg{at}" for at in range(len(example))]
    names: list[str] = []
    for name, value in bound.arguments.items():
        several = bound.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}.{at}" for at in range(len(value))] if several else [name]
    return names


def _format_key(entry: Any) -> str:
    """Return the key, index or name in an entry of a pytree path."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def placements_by_leaf(
    leaves: Sequence[StepLeaf], mesh: DeviceMesh, plan: Mapping[str, Any]
) -> dict[str, Placements]:
    """Return the placements of all tensors of the arguments, by name.

    If several patterns match, the last one counts. A tensor without a match is replicated, except
    for tensors of the optimizer state: a tensor elsewhere in the state with the name and shape of a
    parameter gets the placements of the parameter.
    """
    check_plan(plan)
    tensors = [leaf for leaf in leaves if leaf.is_tensor]
    chosen: dict[str, Placements] = {}
    for pattern, wanted in plan.items():
        check_pattern("plan", pattern)
        if isinstance(wanted, Activations):
            raise PlanError(
                f"plan[{pattern!r}]: Activations are for modules, and the plan of a step is for "
                "tensors of its state and batch only; leave them out"
            )
        asked = as_placements(wanted, mesh, f"plan[{pattern!r}]", AXIS_REMEDY)
        fitting = [leaf for leaf in tensors if matches(pattern, leaf.name)]
        if not fitting:
            names = [leaf.name for leaf in tensors]
            kinds = "tensors of the state or the batch"
            raise no_match_error("plan", pattern, names, kinds, remedy=NAME_REMEDY)
        for leaf in fitting:
            check_placements_fit(leaf.name, leaf.value, asked, mesh)
            chosen[leaf.name] = asked
    parameters = [leaf for leaf in tensors if leaf.name in chosen and leaf.container]
    replicated: Placements = [Replicate()] * mesh.ndim
    return {
        leaf.name: chosen.get(leaf.name)
        or _placements_of_parameter(leaf, parameters, chosen)
        or replicated
        for leaf in tensors
    }


def _placements_of_parameter(
    leaf: StepLeaf, parameters: Sequence[StepLeaf], chosen: Mapping[str, Placements]
) -> Placements | None:
    """Return the placements of the parameter that a leaf of the state belongs to, if any.

    It belongs to the parameter with the longest name that its own name contains, of the same shape.
    """
    if not leaf.container:
        return None
    tokens = leaf.name.split(".")
    longest = 0
    found: list[StepLeaf] = []
    for other in parameters:
        within = other.name[len(other.container) + 1 :].split(".")
        belongs = (
            other.container != leaf.container
            and other.value.shape == leaf.value.shape
            and any(tokens[at : at + len(within)] == within for at in range(1, len(tokens)))
        )
        if belongs and len(within) >= longest:
            if len(within) > longest:
                longest, found = len(within), []
            found.append(other)
    if any(chosen[other.name] != chosen[found[0].name] for other in found):
        raise PlanError(
            f"plan: expected a pattern for {leaf.name!r}, as it has the name and shape of "
            f"{', '.join(other.name for other in found)}, which have different placements"
        )
    return chosen[found[0].name] if found else None
