"""The arguments of a training step: pytrees whose leaves have names, and lie as a plan says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.export.errors import ExportError
from shardwise.export.plan import NO_AXIS, NO_NAME, Placements, check_fits
from shardwise.mesh import DeviceMesh
from shardwise.parallel.activations import Activations
from shardwise.parallel.names import PlanError, check_pattern, matches, unmatched
from shardwise.parallel.specs import placements_of
from shardwise.placement import Replicate
from shardwise.torch_internals import pytree


@dataclass(frozen=True)
class Leaf:
    """A tensor of the arguments, or something else, which is a constant."""

    name: str
    value: Any
    container: str
    """The first key on the way to it, of what is in the state; empty elsewhere."""

    @property
    def is_tensor(self) -> bool:
        """Whether it is given to the step, and not a constant of it."""
        return isinstance(self.value, torch.Tensor)


@dataclass(frozen=True)
class Argument:
    """One argument of a training step."""

    name: str
    leaves: tuple[Leaf, ...]
    structure: Any

    def flat(self, tree: Any, what: str = "") -> list[Any]:
        """The leaves of a tree that should be like the example's.

        Arguments:
            what: what to call it in an error; by default the argument that it is.
        """
        leaves, structure = pytree.tree_flatten(tree)
        if structure != self.structure:
            raise ExportError(
                f"{what or self.name}: expected a tree like the example's, "
                f"{shown(self.structure)}; got {shown(structure)}"
            )
        return leaves


def shown(structure: Any) -> str:
    """A tree on one line."""
    return " ".join(str(structure).split())


def arguments_of(fn: Callable[..., Any], example: Sequence[Any]) -> list[Argument]:
    """The arguments by the names that `fn` has for them, with their leaves.

    Leaves of the first one, the state, are named by their keys in it: `params.layers.0.weight`.
    Those of others begin with the name of the argument: `batch.tokens`.
    """
    if not isinstance(example, tuple | list) or not example:
        raise ExportError(
            "example: expected a tuple of the arguments of fn, the state first; got "
            f"{type(example).__name__}"
        )
    names = _argument_names(fn, example)
    found: list[Argument] = []
    seen: set[str] = set()
    for at, (name, tree) in enumerate(zip(names, example, strict=True)):
        pairs, structure = pytree.tree_flatten_with_path(tree)
        leaves = []
        for path, value in pairs:
            keys = [_key(entry) for entry in path]
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
            leaves.append(Leaf(full, value, keys[0] if at == 0 and keys else ""))
        found.append(Argument(name, tuple(leaves), structure))
    return found


def _argument_names(fn: Callable[..., Any], example: Sequence[Any]) -> list[str]:
    try:
        bound = inspect.signature(fn).bind(*example)
    except TypeError as error:
        raise ExportError(f"example: expected the arguments of fn; {error}") from None
    except ValueError:  # something without a signature
        return [f"arg{at}" for at in range(len(example))]
    names: list[str] = []
    for name, value in bound.arguments.items():
        several = bound.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}.{at}" for at in range(len(value))] if several else [name]
    return names


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


# ---- the plan


def placements_by_leaf(
    leaves: Sequence[Leaf], mesh: DeviceMesh, plan: Mapping[str, Any]
) -> dict[str, Placements]:
    """How tensors lie, by their names.

    Later patterns win. What nothing matches is whole; but what is kept of a parameter elsewhere in
    the state, with its name and shape, as optimizers do, lies as the parameter.
    """
    if not isinstance(plan, Mapping):
        raise PlanError(f"plan: expected a dict of patterns, got {type(plan).__name__}")
    tensors = [leaf for leaf in leaves if leaf.is_tensor]
    chosen: dict[str, Placements] = {}
    for pattern, wanted in plan.items():
        check_pattern("plan", pattern)
        if isinstance(wanted, Activations):
            raise PlanError(
                f"plan[{pattern!r}]: Activations are for modules, and the plan of a step is for "
                "tensors of its state and batch only; leave them out"
            )
        asked = placements_of(wanted, mesh, f"plan[{pattern!r}]", NO_AXIS)
        fitting = [leaf for leaf in tensors if matches(pattern, leaf.name)]
        if not fitting:
            names = [leaf.name for leaf in tensors]
            kinds = "tensors of the state or the batch"
            raise unmatched("plan", pattern, names, kinds, remedy=NO_NAME)
        for leaf in fitting:
            check_fits(leaf.name, leaf.value, asked, mesh)
            chosen[leaf.name] = asked
    named = [leaf for leaf in tensors if leaf.name in chosen and leaf.container]
    whole: Placements = [Replicate()] * mesh.ndim
    return {
        leaf.name: chosen.get(leaf.name) or _followed(leaf, named, chosen) or whole
        for leaf in tensors
    }


def _followed(
    leaf: Leaf, named: Sequence[Leaf], chosen: Mapping[str, Placements]
) -> Placements | None:
    """The placements of the parameter that a leaf of the state belongs to."""
    if not leaf.container:
        return None
    tokens = leaf.name.split(".")
    longest = 0
    found: list[Leaf] = []
    for other in named:
        within = other.name[len(other.container) + 1 :].split(".")
        is_kept = (
            other.container != leaf.container
            and other.value.shape == leaf.value.shape
            and any(tokens[at : at + len(within)] == within for at in range(1, len(tokens)))
        )
        if is_kept and len(within) >= longest:
            if len(within) > longest:
                longest, found = len(within), []
            found.append(other)
    if any(chosen[other.name] != chosen[found[0].name] for other in found):
        raise PlanError(
            f"plan: expected a pattern for {leaf.name!r}, as it has the name and shape of "
            f"{', '.join(other.name for other in found)}, which lie differently"
        )
    return chosen[found[0].name] if found else None
