"""shard_module: lay out a whole model by a plan of name patterns, placements and Activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from shardwise.core.mesh import DeviceMesh, as_mesh
from shardwise.core.placement import Placement, Replicate
from shardwise.parallel.activations import Activations
from shardwise.parallel.parameters import (
    TensorSlot,
    check_ties,
    distribute_slots,
    find_slots,
    layout_for,
)
from shardwise.parallel.plan_spec import (
    PlanError,
    all_modules,
    as_placements,
    check_pattern,
    check_plan,
    drop_unknown_axes,
    join_names,
    matches,
    no_match_error,
)
from shardwise.parallel.styles import ParallelStyle

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

Module = TypeVar("Module", bound=nn.Module)

_MATCHES_MODULE = "which is a module: {!r} names its own parameters; Activations are for modules"
_MATCHES_TENSOR = "which is a parameter or buffer: give it placements; Activations are for modules"


def shard_module(
    module: Module,
    device_mesh: DeviceMesh | TorchMesh,
    plan: Mapping[str, Any],
    *,
    src_data_rank: int | None = 0,
    strict: bool = True,
) -> Module:
    """Replace the parameters and buffers of a module by DTensors, in place, as a plan says.

    All tensors of the model stay DTensors with their global shapes, so its code needs no change.

    Arguments:
        module: any module; every rank has one like it.
        device_mesh: the mesh with all axes, those of data parallelism included.
        plan: a dict from name patterns (`"layers.*.w[qkv].weight"`; the parts between dots are
            matched one by one). The value for a parameter or buffer is its placements, one per axis
            or by axis name: `{"tp": Shard(0)}`; without a match it is replicated. The value for a
            module (`""` is `module` itself) is its `Activations`. If several patterns match, the
            last one counts.
        src_data_rank: the position, along every axis, of the rank whose values all ranks get; with
            None each rank takes the shard of its own values.
        strict: whether a pattern that matches nothing, or an axis that the mesh does not have, is
            an error.

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
    check_plan(plan)
    slots = find_slots(module)
    placements, activations = _match_plan(module, slots, mesh, plan, strict)
    # Everything is checked before anything is changed.
    _extend_to_ties(slots, placements)
    replicated: list[Placement] = [Replicate()] * mesh.ndim
    layouts = [
        (slot, layout_for(slot, mesh, placements.get(slot.path, replicated))) for slot in slots
    ]
    check_ties(layouts)
    hooks = [each.hooks(path, submodule, mesh, strict) for path, submodule, each in activations]
    distribute_slots(layouts, src_data_rank)
    for attach in hooks:
        attach()
    return module


def _match_plan(
    module: nn.Module,
    slots: list[TensorSlot],
    mesh: DeviceMesh,
    plan: Mapping[str, Any],
    strict: bool,
) -> tuple[dict[str, list[Placement]], list[tuple[str, nn.Module, Activations]]]:
    """Return the placements of parameters and buffers by name, and the Activations of modules."""
    modules = list(all_modules(module))
    tensor_names, module_names = [slot.path for slot in slots], [name for name, _ in modules]
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
            matched = [each for each in modules if matches(pattern, each[0])]
            if not matched and strict:
                raise no_match_error(
                    "plan", pattern, module_names, "modules", tensor_names, _MATCHES_TENSOR
                )
            activations += [(*each, wanted) for each in _without_repeats(matched)]
            continue
        spec = wanted if strict else drop_unknown_axes(wanted, mesh)
        asked = as_placements(spec, mesh, f"plan[{pattern!r}]")
        fitting = [name for name in tensor_names if matches(pattern, name)]
        if not fitting and strict:
            meant = _MATCHES_MODULE.format(join_names(pattern, "*"))
            raise no_match_error(
                "plan", pattern, tensor_names, "parameters or buffers", module_names, meant
            )
        placements |= dict.fromkeys(fitting, asked)
    return placements, activations


def _without_repeats(found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Keep each module once, under the first of its names."""
    seen = {id(submodule): (path, submodule) for path, submodule in reversed(found)}
    return list(reversed(seen.values()))


def _extend_to_ties(slots: list[TensorSlot], placements: dict[str, list[Placement]]) -> None:
    """Give a tied parameter the same placements under the names that the plan does not match."""
    known = {id(slot.tensor): placements[slot.path] for slot in slots if slot.path in placements}
    for slot in slots:
        if id(slot.tensor) in known:
            placements.setdefault(slot.path, known[id(slot.tensor)])
