"""parallelize_module: apply styles to the modules that a plan names, with torch's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement
from shardwise.parallel.activations import Activations
from shardwise.parallel.parameters import TensorSlot, check_ties, distribute_slots, find_slots
from shardwise.parallel.plan_spec import (
    PlanError,
    all_modules,
    check_pattern,
    join_names,
    matches,
    no_match_error,
)
from shardwise.parallel.styles import (
    ModuleStyle,
    ParallelStyle,
    as_one_axis_mesh,
    check_unstyled,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | TorchMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, Any] | None = None,
    *,
    src_data_rank: int | None = 0,
    strict: bool = True,
) -> nn.Module:
    """Apply styles of tensor parallelism to the modules that a plan names, in place.

    Arguments:
        module: any module; every rank has one like it.
        device_mesh: the axis of tensor parallelism, such as `mesh["tp"]`.
        parallelize_plan: a style for the module itself, or styles by name pattern:
            `{"layers.*.attention.wq": ColwiseParallel()}`. The parts of a pattern between dots are
            matched one by one; `""` is the module itself; plans may be nested.
        src_data_rank: the rank of the axis whose parameters all ranks get; with None each rank
            keeps its own.
        strict: whether a pattern that matches nothing is an error.

    Returns:
        The module itself.
    """
    mesh = as_one_axis_mesh(device_mesh)
    found = _without_repeats(list(_match_plan(module, parallelize_plan, strict)))
    # Everything is checked before anything is changed.
    layouts: list[tuple[TensorSlot, Layout]] = []
    for path, submodule, style in found:
        if isinstance(style, ModuleStyle):
            style.check(path, submodule)
            check_unstyled(path, submodule, style)
            layouts += style.layouts(path, submodule, mesh)
    check_ties(layouts)
    _check_ties_outside_plan(module, layouts)
    distribute_slots(layouts, src_data_rank)
    for path, submodule, style in found:
        if isinstance(style, ModuleStyle):
            style.hooks(path, submodule, mesh)
        else:
            style.src_data_rank = src_data_rank
            made = style._apply(submodule, mesh)
            module = made if submodule is module else module
    return module


def _match_plan(
    module: nn.Module, plan: Any, strict: bool
) -> Iterator[tuple[str, nn.Module, ParallelStyle]]:
    """Yield the modules that a plan names, each with its style, in the plan's order."""
    modules = list(all_modules(module))
    for pattern, style in _flatten_plan(plan, ""):
        found = [each for each in modules if matches(pattern, each[0])]
        if not found and strict:
            names = [name for name, _ in modules]
            tensors = [slot.path for slot in find_slots(module)]
            meant = "which is a parameter or buffer: styles are for the module that has it"
            raise no_match_error("parallelize_plan", pattern, names, "modules", tensors, meant)
        for path, submodule in found:
            yield path, submodule, style


def _flatten_plan(plan: Any, prefix: str) -> Iterator[tuple[str, ParallelStyle]]:
    """Yield the styles of a plan and of the plans nested in it, with their full patterns."""
    if inspect.isclass(plan) and issubclass(plan, ParallelStyle):
        plan = plan()
    if isinstance(plan, ParallelStyle):
        yield prefix, plan
    elif isinstance(plan, Mapping):
        for pattern, inner in plan.items():
            check_pattern("parallelize_plan", pattern)
            yield from _flatten_plan(inner, join_names(prefix, pattern))
    else:
        where = f"[{prefix!r}]" if prefix else ""
        hint = ""
        if type(plan).__module__.startswith("torch.distributed.tensor"):
            hint = ", which is torch's own: import it from shardwise.parallel"
        elif isinstance(plan, Placement | Activations):
            hint = "; placements and Activations are for shard_module"
        raise PlanError(
            f"parallelize_plan{where}: expected a style, or a dict of them by name; "
            f"got {plan!r}{hint}"
        )


def _without_repeats(
    found: list[tuple[str, nn.Module, ParallelStyle]],
) -> list[tuple[str, nn.Module, ParallelStyle]]:
    """Keep each style once per module, whatever number of names the module has."""
    result: list[tuple[str, nn.Module, ParallelStyle]] = []
    for path, module, style in found:
        others = [(name, other) for name, each, other in result if each is module]
        if any(style == other for _, other in others):
            continue
        for name, other in others:
            if _has_placements(style, module) and _has_placements(other, module):
                raise PlanError(
                    f"{path}: the plan gives it {style!r}, and for {name} {other!r}, which is the "
                    "same module; give it one style"
                )
        result.append((path, module, style))
    return result


def _has_placements(style: ParallelStyle, module: nn.Module) -> bool:
    """Check whether a style lays out parameters of a module."""
    if not isinstance(style, ModuleStyle):
        return False
    style.check("", module)
    return bool(style.placements(module))


def _check_ties_outside_plan(module: nn.Module, layouts: list[tuple[TensorSlot, Layout]]) -> None:
    """Raise PlanError for a tied parameter that the plan lays out under some of its names only."""
    planned = {id(slot.tensor): slot.path for slot, _ in layouts}
    listed = {slot.path for slot, _ in layouts}
    shared = {(id(slot.module), slot.key) for slot, _ in layouts}
    for slot in find_slots(module):
        other = planned.get(id(slot.tensor))
        if other and slot.path not in listed and (id(slot.module), slot.key) not in shared:
            raise PlanError(
                f"{slot.path}: it is tied to {other}, which the plan makes a DTensor, and the plan "
                f"does not name {slot.path}'s module; give it a style too, or untie them"
            )
