"""The arguments of a training step: pytrees whose leaves have names, and placements by a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Replicate
from shardwise.export.errors import ExportError
from shardwise.export.placements import (
    AXIS_REMEDY,
    NAME_REMEDY,
    Placements,
    check_placements_fit,
)
from shardwise.parallel.activations import Activations
from shardwise.parallel.plan_spec import (
    PlanError,
    as_placements,
    check_pattern,
    check_plan,
    matches,
    no_match_error,
)
from shardwise.torch_internals import pytree


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


# ---- the plan


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
            f"{', '.join(other.name for other in found)}, which lie differently"
        )
    return chosen[found[0].name] if found else None
