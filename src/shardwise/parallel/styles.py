"""The base classes of the styles of tensor parallelism, and their common parts.

A style says how one module's parameters are laid out, and which hooks move its inputs and outputs.
`projections.py` has the styles of projections and norms, `prepare.py` those that change inputs and
outputs only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh, mesh_or_current
from shardwise.core.placement import Placement, as_placement
from shardwise.dtensor.tensor import DTensor
from shardwise.parallel.activations import (
    MoveFirstArgument,
    Redistributor,
    ShardLayouts,
    check_on_mesh,
    wrap_shared,
)
from shardwise.parallel.containers import forward_arguments, map_tensors
from shardwise.parallel.parameters import (
    TensorSlot,
    check_ties,
    distribute_slots,
    find_slots,
    layout_for,
)
from shardwise.parallel.plan_spec import PlanError, join_names
from shardwise.torch_internals import forward_pre_hooks


class ParallelStyle(ABC):
    """A way to make a module parallel. A style of your own implements `_apply`."""

    src_data_rank: int | None = 0
    """The rank whose parameters all ranks get; with None each rank keeps its own."""

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Make the module parallel, in place."""


class ModuleStyle(ParallelStyle):
    """A style that has separate steps to check a module and to change it.

    So a whole plan can be checked before any module is changed.
    """

    torch_steps: tuple[str, ...] = ()
    """The names of methods of torch's class that derived styles may override or call."""

    def shown(self, path: str) -> str:
        """Format a module and its style for errors."""
        return f"{path or 'the module'} ({type(self).__name__})"

    def check(self, path: str, module: nn.Module) -> None:
        """Raise PlanError, with the names of module and style, if the style does not fit."""

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Return placements of parameters and buffers by name; others are left as they are."""
        return {}

    @abstractmethod
    def hooks(self, path: str, module: nn.Module, mesh: DeviceMesh) -> None:
        """Register the hooks that move inputs and outputs of the module's forward."""

    def layouts(
        self, path: str, module: nn.Module, mesh: DeviceMesh
    ) -> list[tuple[TensorSlot, Layout]]:
        """Return the parameters and buffers that `placements` names, with their layouts."""
        wanted = self.placements(module)
        slots = {slot.path: slot for slot in find_slots(module, path)}
        found = []
        for name, placement in wanted.items():
            slot = slots[join_names(path, name)]
            found.append((slot, layout_for(slot, mesh, [placement])))
        return found

    @property
    def is_derived(self) -> bool:
        """Whether a class of the user's overrides `_apply` or a step of torch's class."""
        return any(_is_overridden(type(self), name) for name in ("_apply", *self.torch_steps))

    def apply_torch_steps(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Apply the style as torch does, by the steps that a derived class may have overridden."""
        names = [name for name in self.torch_steps if _is_overridden(type(self), name)]
        raise PlanError(
            f"{type(self).__name__} overrides {', '.join(names)}, of torch's class, which "
            "shardwise's does not call; override _apply, or register hooks of your own"
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = as_one_axis_mesh(device_mesh)
        self.check("", module)
        if any(_is_overridden(type(self), name) for name in self.torch_steps):
            return self.apply_torch_steps(module, mesh)
        check_unstyled("", module, self)
        layouts = self.layouts("", module, mesh)
        check_ties(layouts)
        distribute_slots(layouts, self.src_data_rank)
        self.hooks("", module, mesh)
        return module

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))


def _is_overridden(style: type, method: str) -> bool:
    """Check whether a class outside of this package defines a method of a style."""
    owner = next((kind for kind in style.__mro__ if method in vars(kind)), ModuleStyle)
    return not owner.__module__.startswith(f"{__package__}.")


# ---- what all styles share


def as_one_axis_mesh(device_mesh: Any) -> DeviceMesh:
    """Return the mesh of a style, or raise PlanError if it does not have exactly one axis."""
    mesh = mesh_or_current(device_mesh)
    if mesh.ndim != 1:
        name = (mesh.mesh_dim_names or ("tp",))[-1]
        raise PlanError(
            f"device_mesh: expected one axis, got {mesh.axes_shown()}; pass the axis of tensor "
            f"parallelism, device_mesh[{name!r}], or use shard_module for all axes at once"
        )
    return mesh


def as_single_placement(given: Any, argument: str) -> Placement | None:
    """Return the placement that a style's argument gives: itself, in a tuple of one, or None."""
    if isinstance(given, tuple | list) and len(given) == 1:
        (given,) = given
    if given is None:
        return None
    return as_placement(given, argument)


class _StyledInput(MoveFirstArgument):
    """The hook of a styled module, by which `check_unstyled` knows it."""

    __slots__ = ()


@dataclass(frozen=True, eq=False, slots=True)
class _MoveInput:
    """Makes an input a DTensor and redistributes it.

    Arguments:
        shards: the layouts of plain tensors, which are local shards.
    """

    what: str
    mesh: DeviceMesh
    shards: ShardLayouts
    redistribute: Redistributor

    def __call__(self, value: torch.Tensor) -> DTensor:
        if isinstance(value, DTensor):
            check_on_mesh(value, self.mesh, self.what)
        else:
            value = wrap_shared(value, self.shards.layout_of(value), self.what)
        return self.redistribute(value)


def make_input_hook(
    what: str,
    module: nn.Module,
    mesh: DeviceMesh,
    given: Placement,
    wanted: Placement,
    features: int | None = None,
) -> Callable[..., Any]:
    """Return a forward pre-hook that redistributes a module's first tensor argument, as a DTensor.

    Arguments:
        what: the argument's name in errors.
        given: the placement that a plain tensor is assumed to have.
        wanted: the placement that the module needs.
        features: the global size of the last dim, if the module knows it.
    """
    shards = ShardLayouts(mesh, given, features)
    move = _MoveInput(what, mesh, shards, _redistribute_to(what, wanted))
    return _StyledInput(forward_arguments(module).named, move, what)


def check_unstyled(path: str, module: nn.Module, style: ModuleStyle) -> None:
    """Raise PlanError for a module that has a style already: two styles would both unwrap its
    result to a local tensor."""
    is_styled = any(isinstance(hook, _StyledInput) for hook in forward_pre_hooks(module))
    if is_styled and style.placements(module):
        raise PlanError(
            f"{path or 'the module'}: a call before this one gave it a style that lays out its "
            f"parameters, and now it should get {style!r}; parallelize a module once"
        )


def _redistribute_to(what: str, placement: Placement) -> Redistributor:
    """Return a function that moves DTensors on a mesh of one axis to a placement."""
    return Redistributor(what, partial(_with_placement, placement=placement))


def _with_placement(layout: Layout, placement: Placement) -> Layout:
    return Layout.from_placements(layout.mesh, layout.shape, [placement])


@dataclass(frozen=True, eq=False, slots=True)
class MoveOutput:
    """Moves a result to a placement, if one is given, and then unwraps it if `use_local_output`."""

    what: str
    redistribute: Redistributor | None
    use_local_output: bool

    def __call__(self, output: DTensor) -> Any:
        if not isinstance(output, DTensor):
            raise PlanError(
                f"{self.what}: expected its forward to return a DTensor, got "
                f"{type(output).__name__}; does a hook of its own change the result?"
            )
        if self.redistribute is not None:
            output = self.redistribute(output)
        return output.to_local() if self.use_local_output else output


def make_output_move(what: str, placement: Placement | None, use_local_output: bool) -> MoveOutput:
    """Return the move of a result to a placement, if one is given."""
    redistribute = None if placement is None else _redistribute_to(what, placement)
    return MoveOutput(what, redistribute, use_local_output)


def leave_with_one(move: MoveOutput, module: nn.Module, args: Any, output: Any) -> Any:
    """Move the result of a module: a forward hook, with its first argument bound."""
    return move(output)


def leave_with_several(move: MoveOutput, module: nn.Module, args: Any, output: Any) -> Any:
    """Move all DTensors among the results of a module, as `leave_with_one`."""
    return map_tensors(output, lambda each: move(each) if isinstance(each, DTensor) else each)
