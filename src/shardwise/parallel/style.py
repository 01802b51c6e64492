"""What a style is: how one module's parameters lie, and what happens at its entrance and exit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh, as_mesh
from shardwise.parallel.containers import arguments_of, changed_first_argument
from shardwise.parallel.crossing import Crossing, PieceLayouts, check_mesh, wrapped
from shardwise.parallel.names import PlanError, joined
from shardwise.parallel.placing import Slot, check_ties, layout_for, place, slots
from shardwise.placement import Placement, Replicate, as_placement
from shardwise.tensor import DTensor, unwrap
from shardwise.torch_internals import forward_pre_hooks


class ParallelStyle(ABC):
    """How a module is made parallel. A style of your own has an `_apply`."""

    src_data_rank: int | None = 0
    """The rank whose parameters all ranks get; None: each its own."""

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Make the module parallel, in place."""


class ModuleStyle(ParallelStyle):
    """A style that says what it will do to a module, so that it can be checked beforehand."""

    def shown(self, path: str) -> str:
        """A module and its style, for errors."""
        return f"{path or 'the module'} ({type(self).__name__})"

    def check(self, path: str, module: nn.Module) -> None:
        """Refuse a module that the style does not fit, naming both."""

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """How the module's parameters and buffers should lie, by name; others are left alone."""
        return {}

    @abstractmethod
    def hooks(self, path: str, module: nn.Module, mesh: DeviceMesh) -> None:
        """Put hooks at the entrance and exit of the module's forward."""

    def layouts(self, path: str, module: nn.Module, mesh: DeviceMesh) -> list[tuple[Slot, Layout]]:
        """The same as `placements`, for this mesh, by where they are held."""
        wanted = self.placements(module)
        held = {slot.path: slot for slot in slots(module, path)}
        found = []
        for name, placement in wanted.items():
            slot = held[joined(path, name)]
            found.append((slot, layout_for(slot, mesh, [placement])))
        return found

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = one_axis(device_mesh)
        self.check("", module)
        check_unstyled("", module, self)
        layouts = self.layouts("", module, mesh)
        check_ties(layouts)
        place(layouts, self.src_data_rank)
        self.hooks("", module, mesh)
        return module

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))


def one_axis(device_mesh: Any) -> DeviceMesh:
    """The mesh of a style: one axis."""
    if device_mesh is None:
        raise PlanError("device_mesh: expected a DeviceMesh of one axis, got None")
    mesh = as_mesh(device_mesh)
    if mesh.ndim != 1:
        name = (mesh.mesh_dim_names or ("tp",))[-1]
        raise PlanError(
            f"device_mesh: expected one axis, got {mesh.axes_shown()}; pass the axis of tensor "
            f"parallelism, device_mesh[{name!r}], or use shard_module for all axes at once"
        )
    return mesh


def one_placement(given: Any, argument: str) -> Placement | None:
    """A style's argument for one tensor: a placement, or a tuple of just one, or None."""
    if isinstance(given, tuple | list) and len(given) == 1:
        (given,) = given
    if given is None:
        return None
    return as_placement(given, argument)


def entrance(
    what: str,
    module: nn.Module,
    mesh: DeviceMesh,
    given: Placement,
    wanted: Placement,
    features: int | None = None,
) -> Callable[..., Any]:
    """A hook that makes the first tensor a module is called with a DTensor, and moves it.

    Arguments:
        given: how plain tensors lie.
        wanted: how the module needs it.
        features: the global size of the last dim, where the module knows it.
    """
    names = arguments_of(module).named
    pieces = PieceLayouts(mesh, given, features)
    crossing = to_placement(what, wanted)

    def entered(value: torch.Tensor) -> DTensor:
        if isinstance(value, DTensor):
            check_mesh(value, mesh, what)
        else:
            value = wrapped(value, pieces.layout(value), what)
        return crossing(value)

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return changed_first_argument(args, kwargs, names, entered, what)

    _entrances.add(enter)
    return enter


def check_unstyled(path: str, module: nn.Module, style: ModuleStyle) -> None:
    """Refuse a style for a module that has one: its results would be made local twice."""
    before = any(hook in _entrances for hook in forward_pre_hooks(module))
    if before and style.placements(module):
        raise PlanError(
            f"{path or 'the module'}: a call before this one gave it a style that lays out its "
            f"parameters, and now it should get {style!r}; parallelize a module once"
        )


def to_placement(what: str, placement: Placement) -> Crossing:
    """Moves DTensors of a mesh of one axis."""

    def target(layout: Layout) -> Layout:
        return Layout.from_placements(layout.mesh, layout.shape, [placement])

    return Crossing(what, target)


def leaving(
    what: str, placement: Placement | None, use_local_output: bool
) -> Callable[[DTensor], Any]:
    """What a result goes through: moved to a placement, if one is asked for; made local."""
    crossing = None if placement is None else to_placement(what, placement)

    def leave(output: DTensor) -> Any:
        if not isinstance(output, DTensor):
            raise PlanError(
                f"{what}: expected its forward to return a DTensor, got {type(output).__name__}; "
                "does a hook of its own change the result?"
            )
        if crossing is not None:
            output = crossing(output)
        return unwrap(output) if use_local_output else output

    return leave


WHOLE = Replicate()

_entrances: WeakSet[Callable[..., Any]] = WeakSet()
"""The hooks by which a module is known to have a style; copies of a module have the same ones."""
