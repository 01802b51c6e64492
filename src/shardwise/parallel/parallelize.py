"""parallelize_module: styles for the modules that a plan names, as torch has it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh
from shardwise.parallel.activations import Activations
from shardwise.parallel.names import (
    PlanError,
    all_modules,
    check_pattern,
    joined,
    matches,
    unmatched,
)
from shardwise.parallel.placing import Slot, check_ties, place, slots
from shardwise.parallel.style import ModuleStyle, ParallelStyle, check_unstyled, one_axis
from shardwise.placement import Placement

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
            `{"layers.*.attention.wq": ColwiseParallel()}`. A pattern is matched token by token;
            `""` is the module itself; plans may be nested.
        src_data_rank: the rank of the axis whose parameters all ranks get; None: each its own.
        strict: whether a pattern that matches nothing is an error.

    Returns:
        The module itself.
    """
    mesh = one_axis(device_mesh)
    found = _once(list(_resolved(module, parallelize_plan, strict)))
    # All is checked before anything is changed.
    layouts: list[tuple[Slot, Layout]] = []
    for path, submodule, style in found:
        if isinstance(style, ModuleStyle):
            style.check(path, submodule)
            check_unstyled(path, submodule, style)
            layouts += style.layouts(path, submodule, mesh)
    check_ties(layouts)
    _check_left_behind(module, layouts)
    place(layouts, src_data_rank)
    for path, submodule, style in found:
        if isinstance(style, ModuleStyle):
            style.hooks(path, submodule, mesh)
        else:
            style.src_data_rank = src_data_rank
            made = style._apply(submodule, mesh)
            module = made if submodule is module else module
    return module


def _resolved(
    module: nn.Module, plan: Any, strict: bool
) -> Iterator[tuple[str, nn.Module, ParallelStyle]]:
    """The modules that a plan names, each with its style, in the plan's order."""
    modules = list(all_modules(module))
    for pattern, style in _flat(plan, ""):
        found = [each for each in modules if matches(pattern, each[0])]
        if not found and strict:
            names, tensors = [name for name, _ in modules], [slot.path for slot in slots(module)]
            meant = "which is a parameter or buffer: styles are for the module that has it"
            raise unmatched("parallelize_plan", pattern, names, "modules", tensors, meant)
        for path, submodule in found:
            yield path, submodule, style


def _flat(plan: Any, prefix: str) -> Iterator[tuple[str, ParallelStyle]]:
    """The styles of a plan and of the plans in it, by whole patterns."""
    if inspect.isclass(plan) and issubclass(plan, ParallelStyle):
        plan = plan()
    if isinstance(plan, ParallelStyle):
        yield prefix, plan
    elif isinstance(plan, Mapping):
        for pattern, inner in plan.items():
            check_pattern("parallelize_plan", pattern)
            yield from _flat(inner, joined(prefix, pattern))
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


def _once(
    found: list[tuple[str, nn.Module, ParallelStyle]],
) -> list[tuple[str, nn.Module, ParallelStyle]]:
    """Each style once for each module, though it may have several names."""
    result: list[tuple[str, nn.Module, ParallelStyle]] = []
    for path, module, style in found:
        others = [(name, other) for name, each, other in result if each is module]
        if any(style == other for _, other in others):
            continue
        for name, other in others:
            if _places(style, module) and _places(other, module):
                raise PlanError(
                    f"{path}: the plan gives it {style!r}, and for {name} {other!r}, which is the "
                    "same module; give it one style"
                )
        result.append((path, module, style))
    return result


def _places(style: ParallelStyle, module: nn.Module) -> bool:
    """Whether a style says how parameters lie."""
    if not isinstance(style, ModuleStyle):
        return False
    style.check("", module)
    return bool(style.placements(module))


def _check_left_behind(module: nn.Module, layouts: list[tuple[Slot, Layout]]) -> None:
    """Refuse to break a tie: a parameter that the plan lays out under one of its names only."""
    planned = {id(slot.tensor): slot.path for slot, _ in layouts}
    listed = {slot.path for slot, _ in layouts}
    shared = {(id(slot.module), slot.key) for slot, _ in layouts}
    for slot in slots(module):
        other = planned.get(id(slot.tensor))
        if other and slot.path not in listed and (id(slot.module), slot.key) not in shared:
            raise PlanError(
                f"{slot.path}: it is tied to {other}, which the plan makes a DTensor, and the plan "
                f"does not name {slot.path}'s module; give it a style too, or untie them"
            )
