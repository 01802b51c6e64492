"""How a plan says how a tensor should lie: one placement per axis, or a few axes by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.layout import Layout
from shardwise.mesh import Axis, DeviceMesh
from shardwise.parallel.names import PlanError
from shardwise.placement import Placement, Replicate, as_placement


def is_spec(value: Any) -> bool:
    """Whether this says how one tensor lies."""
    if isinstance(value, Mapping):
        return bool(value) and all(_is_placement(each) for each in value.values())
    return _is_many(value) and bool(value) and all(map(_is_placement, value))


def _is_many(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_placement(value: Any) -> bool:
    kind = type(value)
    return isinstance(value, Placement) or kind.__module__.startswith("torch.distributed.tensor")


OTHER_AXES = "Make the mesh with that axis, or pass strict=False to leave such axes out"


def placements_of(
    spec: Any, mesh: DeviceMesh, argument: str, remedy: str = OTHER_AXES
) -> list[Placement]:
    """One placement per axis; an axis that is not named holds the tensor whole.

    Arguments:
        remedy: what to do about axes that the mesh does not have.
    """
    if isinstance(spec, Mapping):
        result: list[Placement] = [Replicate()] * mesh.ndim
        for axis, placement in named(spec, mesh, argument, remedy).items():
            result[axis] = placement
        return result
    if isinstance(spec, Placement):
        spec = [spec]
    if not _is_many(spec) or len(spec) != mesh.ndim:
        raise PlanError(
            f"{argument}: expected {mesh.ndim} placements, one per axis of {mesh!r}, or such as "
            f"{{{mesh.axis_name(0)!r}: Shard(0)}}; got {spec!r}"
        )
    return [as_placement(each, f"{argument}[{at}]") for at, each in enumerate(spec)]


def named(
    spec: Mapping[Axis, Placement], mesh: DeviceMesh, argument: str, remedy: str = OTHER_AXES
) -> dict[int, Placement]:
    """The placements by the position of their axis."""
    result: dict[int, Placement] = {}
    for axis, placement in spec.items():
        if not has_axis(mesh, axis):
            raise PlanError(
                f"{argument}: expected axes of the mesh, {mesh.axes_shown()}; got {axis!r}. "
                f"{remedy}"
            )
        at = mesh.axis(axis)
        if at in result:
            raise PlanError(
                f"{argument}: expected each axis once, got {mesh.axis_name(at)} twice: {spec!r}"
            )
        result[at] = as_placement(placement, f"{argument}[{axis!r}]")
    return result


def has_axis(mesh: DeviceMesh, axis: Any) -> bool:
    """Whether this names an axis of the mesh, or is the position of one."""
    if isinstance(axis, str):
        return axis in (mesh.mesh_dim_names or ())
    return isinstance(axis, int) and -mesh.ndim <= axis < mesh.ndim


def without_strange_axes(spec: Any, mesh: DeviceMesh) -> Any:
    """A spec without the axes that the mesh does not have."""
    if isinstance(spec, Mapping) and is_spec(spec):
        return {axis: each for axis, each in spec.items() if has_axis(mesh, axis)}
    return spec


def laid_by(layout: Layout, spec: Any, argument: str) -> Layout:
    """A tensor's layout after a spec: axes that it does not name stay as they are."""
    mesh = layout.mesh
    if not isinstance(spec, Mapping):
        return Layout.from_placements(mesh, layout.shape, placements_of(spec, mesh, argument))
    changes = named(spec, mesh, argument)
    placements = [changes.get(axis, each) for axis, each in enumerate(layout.placements)]
    plain = Layout.from_placements(mesh, layout.shape, placements)
    order = []
    for before, after in zip(layout.shard_order, plain.shard_order, strict=True):
        stay = [axis for axis in before if axis in after and axis not in changes]
        order.append((*stay, *(axis for axis in after if axis not in stay)))
    return Layout.from_placements(mesh, layout.shape, placements, order)
