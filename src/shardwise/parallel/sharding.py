"""shard_module: patterns to placements, for parameters, inputs and outputs; all on one page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from shardwise.mesh import DeviceMesh, as_mesh
from shardwise.parallel.activations import Activations
from shardwise.parallel.names import (
    PlanError,
    all_modules,
    check_pattern,
    joined,
    matches,
    unmatched,
)
from shardwise.parallel.placing import Slot, check_ties, layout_for, place, slots
from shardwise.parallel.specs import placements_of, without_strange_axes
from shardwise.parallel.style import ParallelStyle
from shardwise.placement import Placement, Replicate

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

Module = TypeVar("Module", bound=nn.Module)

_OF_MODULE = "which is a module: {!r} names its own parameters; Activations are for modules"
_OF_TENSOR = "which is a parameter or buffer: give it placements; Activations are for modules"


def shard_module(
    module: Module,
    device_mesh: DeviceMesh | TorchMesh,
    plan: Mapping[str, Any],
    *,
    src_data_rank: int | None = 0,
    strict: bool = True,
) -> Module:
    """Make DTensors of the parameters and buffers of a module, in place, as a plan says.

    Everything stays a DTensor with its global shape, so the module's code needs no change.

    Arguments:
        module: any module; every rank has one like it.
        device_mesh: where it should lie: all axes, those of data parallelism too.
        plan: by name pattern (`"layers.*.w[qkv].weight"`; each part between dots is matched by
            itself). For a parameter or buffer its placements, one per axis or by the names of axes:
            `{"tp": Shard(0)}`; what no pattern matches is whole on every rank. For a module
            (`""` is `module` itself) its `Activations`. The last pattern that matches counts.
        src_data_rank: the position, along every axis, of the rank whose values all get; None lets
            each rank take its piece of what it has.
        strict: whether a pattern that matches nothing, or an axis the mesh does not have, is an
            error.

    Returns:
        The module itself.

    Example:
        >>> shard_module(model, mesh, {
        ...     "up.weight": {"tp": Shard(0)},
        ...     "up.bias": {"tp": Shard(0)},
        ...     "down.weight": {"tp": Shard(1)},
        ...     "": Activations(inputs={"dp": Shard(0)}),
        ... })
    """
    mesh = as_mesh(device_mesh)
    if not isinstance(plan, Mapping):
        raise PlanError(f"plan: expected a dict of patterns, got {type(plan).__name__}")
    held = slots(module)
    placements, activations = _resolved(module, held, mesh, plan, strict)
    # All is checked before anything is changed.
    _spread_over_ties(held, placements)
    whole: list[Placement] = [Replicate()] * mesh.ndim
    layouts = [(slot, layout_for(slot, mesh, placements.get(slot.path, whole))) for slot in held]
    check_ties(layouts)
    hooks = [each.hooks(path, submodule, mesh, strict) for path, submodule, each in activations]
    place(layouts, src_data_rank)
    for attach in hooks:
        attach()
    return module


def _resolved(
    module: nn.Module, held: list[Slot], mesh: DeviceMesh, plan: Mapping[str, Any], strict: bool
) -> tuple[dict[str, list[Placement]], list[tuple[str, nn.Module, Activations]]]:
    """What a plan says of parameters and buffers, by their names; and of modules."""
    modules = list(all_modules(module))
    held_names, module_names = [slot.path for slot in held], [name for name, _ in modules]
    placements: dict[str, list[Placement]] = {}
    activations: list[tuple[str, nn.Module, Activations]] = []
    for pattern, wanted in plan.items():
        check_pattern("plan", pattern)
        if isinstance(wanted, ParallelStyle):
            raise PlanError(
                f"plan[{pattern!r}]: expected placements or Activations, got a style, "
                f"{wanted!r}; styles are for parallelize_module"
            )
        if isinstance(wanted, Activations):
            here = [each for each in modules if matches(pattern, each[0])]
            if not here and strict:
                raise unmatched("plan", pattern, module_names, "modules", held_names, _OF_TENSOR)
            activations += [(*each, wanted) for each in _once(here)]
            continue
        chosen = wanted if strict else without_strange_axes(wanted, mesh)
        asked = placements_of(chosen, mesh, f"plan[{pattern!r}]")
        fitting = [name for name in held_names if matches(pattern, name)]
        if not fitting and strict:
            kinds, meant = "parameters or buffers", _OF_MODULE.format(joined(pattern, "*"))
            raise unmatched("plan", pattern, held_names, kinds, module_names, meant)
        placements |= dict.fromkeys(fitting, asked)
    return placements, activations


def _once(found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Each module under the first of its names."""
    seen = {id(submodule): (path, submodule) for path, submodule in reversed(found)}
    return list(reversed(seen.values()))


def _spread_over_ties(held: list[Slot], placements: dict[str, list[Placement]]) -> None:
    """What the plan says of one name of a tied parameter holds for the names it does not list."""
    known = {id(slot.tensor): placements[slot.path] for slot in held if slot.path in placements}
    for slot in held:
        if id(slot.tensor) in known:
            placements.setdefault(slot.path, known[id(slot.tensor)])
