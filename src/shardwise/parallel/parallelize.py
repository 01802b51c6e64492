"""Apply a plan to a whole model: shard_module, and torch's parallelize_module and loss_parallel."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from torch import nn

from shardwise.api.wrappers import check_unwrapped
from shardwise.core.errors import also
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh, as_mesh, mesh_or_current
from shardwise.core.placement import Placement, Replicate
from shardwise.parallel.activations import Activations
from shardwise.parallel.parameters import (
    TensorSlot,
    check_ties,
    distribute_slots,
    existing_layout,
    find_slots,
    layout_for,
    tied_slots,
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
    names_nothing_on_purpose,
    no_match_error,
    warn_of_no_match,
)
from shardwise.parallel.prepare import from_torch_style, is_of_torch
from shardwise.parallel.styles import (
    ModuleStyle,
    ParallelStyle,
    as_one_axis_mesh,
    check_unstyled,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

Module = TypeVar("Module", bound=nn.Module)

# ---- shard_module: placements and Activations, on all axes of a mesh

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
            an error; if not, such a pattern is a warning. A pattern that names only what is None,
            such as a module of another pipeline stage, is skipped.

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
    check_unwrapped("shard_module", module)
    slots = find_slots(module)
    placements, activations = _match_layouts(module, slots, mesh, plan, strict)
    # Everything is checked before anything is changed.
    _extend_to_ties(slots, placements)
    layouts = [(slot, _layout_in_plan(slot, mesh, placements)) for slot in slots]
    check_ties(layouts)
    hooks = [each.hooks(path, submodule, mesh, strict) for path, submodule, each in activations]
    distribute_slots(layouts, src_data_rank)
    for attach in hooks:
        attach()
    return module


def _layout_in_plan(
    slot: TensorSlot, mesh: DeviceMesh, placements: dict[str, list[Placement]]
) -> Layout:
    """Return the layout that a plan gives a tensor; one that the plan does not match keeps the
    layout that it has on this mesh, or is replicated."""
    if slot.path not in placements:
        existing = existing_layout(slot, mesh)
        if existing is not None:
            return existing
    return layout_for(slot, mesh, placements.get(slot.path, [Replicate()] * mesh.ndim))


def _match_layouts(
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
            if not matched and not names_nothing_on_purpose(module, pattern):
                error = no_match_error(
                    "plan", pattern, module_names, "modules", tensor_names, _MATCHES_TENSOR
                )
                if strict:
                    raise error
                warn_of_no_match(error, stacklevel=3)
            activations += [(*each, wanted) for each in _first_names(matched)]
            continue
        spec = wanted if strict else drop_unknown_axes(wanted, mesh)
        asked = as_placements(spec, mesh, f"plan[{pattern!r}]")
        fitting = [name for name in tensor_names if matches(pattern, name)]
        if not fitting and not names_nothing_on_purpose(module, pattern):
            meant = _MATCHES_MODULE.format(join_names(pattern, "*"))
            error = no_match_error(
                "plan", pattern, tensor_names, "parameters or buffers", module_names, meant
            )
            if strict:
                raise error
            warn_of_no_match(error, stacklevel=3)
        placements |= dict.fromkeys(fitting, asked)
    return placements, activations


def _first_names(found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Keep each module once, under the first of its names."""
    seen = {id(submodule): (path, submodule) for path, submodule in reversed(found)}
    return list(reversed(seen.values()))


def _extend_to_ties(slots: list[TensorSlot], placements: dict[str, list[Placement]]) -> None:
    """Give a tied parameter the same placements under the names that the plan does not match."""
    known = {id(slot.tensor): placements[slot.path] for slot in slots if slot.path in placements}
    for slot in slots:
        if id(slot.tensor) in known:
            placements.setdefault(slot.path, known[id(slot.tensor)])


# ---- parallelize_module: styles, on one axis


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
        device_mesh: the axis of tensor parallelism, such as `mesh["tp"]`; by default the mesh of
            `with mesh:`. A style of your own gets the mesh as it is, of any number of axes.
        parallelize_plan: a style for the module itself, or styles by name pattern:
            `{"layers.*.attention.wq": ColwiseParallel()}`. The parts of a pattern between dots are
            matched one by one; `""` is the module itself; plans may be nested.
        src_data_rank: the rank of the axis whose parameters all ranks get; with None each rank
            keeps its own.
        strict: whether a pattern that matches nothing is an error; if not, it is a warning, as in
            torch. A pattern that names only modules that are None, as in the stages of a pipeline,
            is skipped.

    Returns:
        The module itself.
    """
    if parallelize_plan is None:
        warnings.warn(
            "parallelize_module: there is no parallelize_plan, so the module stays as it is",
            stacklevel=2,
        )
        return module
    check_unwrapped("parallelize_module", module)
    found = _without_repeats(_match_styles(module, parallelize_plan, strict))
    if any(_has_steps(style) for _, _, style in found):
        mesh = as_one_axis_mesh(device_mesh)
    else:  # a style of the user's own may take any mesh
        mesh = mesh_or_current(device_mesh)
    # Everything is checked before anything is changed.
    layouts: list[tuple[TensorSlot, Layout]] = []
    for path, submodule, style in found:
        if _has_steps(style):
            style.check(path, submodule)
            check_unstyled(path, submodule, style)
            layouts += style.layouts(path, submodule, mesh)
    check_ties(layouts)
    distribute_slots(layouts + tied_slots(module, layouts), src_data_rank)
    for path, submodule, style in found:
        if _has_steps(style):
            style.hooks(path, submodule, mesh)
        else:
            style.src_data_rank = src_data_rank
            made = style._apply(submodule, mesh)
            module = made if submodule is module else module
    return module


def _has_steps(style: ParallelStyle) -> TypeGuard[ModuleStyle]:
    """Check whether a style is applied in our steps, rather than by an `_apply` of the user's."""
    return isinstance(style, ModuleStyle) and not style.is_derived


def _match_styles(
    module: nn.Module, plan: Any, strict: bool
) -> list[tuple[str, nn.Module, ParallelStyle]]:
    """Return the modules that a plan names, each with its style, in the plan's order."""
    modules = list(all_modules(module))
    result = []
    for pattern, style in _flatten_plan(plan, ""):
        found = [each for each in modules if matches(pattern, each[0])]
        if not found and not names_nothing_on_purpose(module, pattern):
            names = [name for name, _ in modules]
            tensors = [slot.path for slot in find_slots(module)]
            meant = "which is a parameter or buffer: styles are for the module that has it"
            error = no_match_error("parallelize_plan", pattern, names, "modules", tensors, meant)
            if strict:
                raise error
            warn_of_no_match(error, stacklevel=3)
        result += [(path, submodule, style) for path, submodule in found]
    return result


def _flatten_plan(plan: Any, prefix: str) -> Iterator[tuple[str, ParallelStyle]]:
    """Yield the styles of a plan and of the plans nested in it, with their full patterns."""
    if inspect.isclass(plan) and issubclass(plan, ParallelStyle):
        plan = plan()
    plan = from_torch_style(plan)
    if isinstance(plan, ParallelStyle):
        yield prefix, plan
    elif isinstance(plan, Mapping):
        for pattern, inner in plan.items():
            check_pattern("parallelize_plan", pattern)
            yield from _flatten_plan(inner, join_names(prefix, pattern))
    else:
        where = f"[{prefix!r}]" if prefix else ""
        hint = ""
        if any(is_of_torch(kind) for kind in getattr(plan, "__mro__", type(plan).__mro__)):
            hint = ", which is torch's own: import ParallelStyle from shardwise.parallel"
        elif isinstance(plan, Placement | Activations):
            hint = "; placements and Activations are for shard_module"
        raise also(PlanError, TypeError)(
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
    if not _has_steps(style):
        return False
    style.check("", module)
    return bool(style.placements(module))


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Do nothing: here for programs that come from torch, which needs this block.

    `cross_entropy` of DTensors that are split along the classes never gathers them, inside and
    outside of this block. Two small all-reduces compute the maximum and the sums of each row, for
    every reduction, with weights, `ignore_index` and label smoothing, on any mesh; the backward
    communicates nothing. torch needs the block around `backward()` too.

    Example:
        >>> with loss_parallel():
        ...     loss = F.cross_entropy(model(tokens), labels)
        ...     loss.backward()
    """
    yield
