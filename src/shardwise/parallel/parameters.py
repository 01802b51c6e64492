"""Replace the parameters and buffers of a module by DTensors, in place; tied ones stay tied."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardwise.api.distribute import distribute_tensor
from shardwise.api.optimizers import note_replaced
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement
from shardwise.core.tensor_state import ensure_state, state_of, user_attributes
from shardwise.dtensor.tensor import DTensor
from shardwise.parallel.plan_spec import PlanError, all_modules, join_names
from shardwise.torch_internals import own_buffers, own_parameters


@dataclass(frozen=True)
class TensorSlot:
    """One name of a parameter or buffer: the module that holds it, and its key there."""

    path: str
    module: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that the module holds now."""
        found = own_parameters(self.module).get(self.key)
        if found is None:
            found = own_buffers(self.module)[self.key]  # type: ignore[assignment]
        assert found is not None, "only slots that hold something are listed"
        return found

    def replace(self, tensor: torch.Tensor) -> None:
        """Put another tensor into the module."""
        if own_parameters(self.module).get(self.key) is not None:
            own_parameters(self.module)[self.key] = tensor  # type: ignore[assignment]
        else:
            own_buffers(self.module)[self.key] = tensor


def find_slots(module: nn.Module, prefix: str = "") -> list[TensorSlot]:
    """List every parameter and buffer under every name it has: a tied one has several slots."""
    found = []
    for path, submodule in all_modules(module, prefix):
        for tensors in (own_parameters(submodule), own_buffers(submodule)):
            for key, tensor in tensors.items():
                if tensor is not None:
                    found.append(TensorSlot(join_names(path, key), submodule, key))
    return found


def check_ties(wanted: Sequence[tuple[TensorSlot, Layout]]) -> None:
    """Raise PlanError if a plan gives one tensor two layouts, under two of its names."""
    seen: dict[int, tuple[TensorSlot, Layout]] = {}
    for slot, layout in wanted:
        other, before = seen.setdefault(id(slot.tensor), (slot, layout))
        if before is not layout:
            raise PlanError(
                f"{slot.path}: it is tied to {other.path}, and the plan lays one out as {layout!r} "
                f"and the other as {before!r}; give both the same placements, or untie them"
            )


def existing_layout(slot: TensorSlot, mesh: DeviceMesh) -> Layout | None:
    """Return the layout that a tensor has on this mesh already, or that an earlier call has given
    it under another of its names; None for one that is still plain, or on another mesh."""
    tensor = slot.tensor
    found = tensor if isinstance(tensor, DTensor) else _replacement(tensor, mesh)
    return found._layout if found is not None and found._layout.mesh is mesh else None


def _replacement(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor | None:
    """Return the DTensor that an earlier call has made of a plain tensor, if it still exists.

    A module that an earlier call did not see still has the plain tensor. It gets the same DTensor,
    so the two modules stay tied.
    """
    notes = state_of(tensor)
    if notes is None or notes.replaced_by is None:
        return None
    found = notes.replaced_by.get(mesh.get_rank(), lambda: None)()
    return found if isinstance(found, DTensor) else None


def layout_for(slot: TensorSlot, mesh: DeviceMesh, placements: Sequence[Placement]) -> Layout:
    """Return the layout that a plan asks for, or raise PlanError if the tensor cannot have it."""
    tensor = slot.tensor
    try:
        layout = Layout.from_placements(mesh, tensor.shape, placements)
    except ValueError as error:
        raise PlanError(f"{slot.path}: {error.args[0]}") from None
    if isinstance(tensor, nn.Parameter) and any(op != "sum" for _, op in layout.partial):
        raise PlanError(
            f"{slot.path}: expected placements with which a parameter has its gradient, got "
            f"{layout!r}; Replicate() is for one that is the same on every rank"
        )
    made = tensor if isinstance(tensor, DTensor) else _replacement(tensor, mesh)
    if made is not None and made._layout is not layout:
        before = made._layout
        changes_mesh = before.mesh is not mesh
        raise PlanError(
            f"{slot.path}: {'it' if made is tensor else 'a parameter that it is tied to'} is a "
            f"DTensor {before!r} {f'on {before.mesh!r} ' * changes_mesh}already, and the plan "
            f"wants {layout!r}{f' on {mesh!r}' * changes_mesh}; lay a module out once, give tied "
            "parameters the same placements, or redistribute the parameter yourself. To untie it: "
            "module.weight = nn.Parameter(module.weight.detach().clone()), before the first call"
        )
    if is_lazy(tensor):
        raise PlanError(
            f"{slot.path}: it is lazy and has no shape yet; run a forward first, in one process"
        )
    return layout


def distribute_slots(
    wanted: Sequence[tuple[TensorSlot, Layout]], src_data_rank: int | None
) -> None:
    """Replace parameters and buffers by DTensors, in the given order; tied ones stay tied, also
    with those that an earlier call has replaced.

    Every rank of the mesh must call this. All ranks get the values of the rank `src_data_rank`;
    with None each rank takes the shard of its own values.
    """
    made: dict[int, torch.Tensor] = {}
    kept = [(slot, slot.tensor, layout) for slot, layout in wanted]  # alive, so that ids are unique
    for slot, tensor, layout in kept:
        if isinstance(tensor, DTensor):
            continue
        if id(tensor) not in made:
            mesh = layout.mesh
            found = _replacement(tensor, mesh)
            if found is None:
                found = _distribute(tensor, layout, src_data_rank)
                notes = ensure_state(tensor)
                notes.replaced_by = notes.replaced_by or {}
                notes.replaced_by[mesh.get_rank()] = weakref.ref(found)
            made[id(tensor)] = found
            note_replaced(tensor, slot.path)
        slot.replace(made[id(tensor)])


def tied_slots(
    module: nn.Module, wanted: Sequence[tuple[TensorSlot, Layout]]
) -> list[tuple[TensorSlot, Layout]]:
    """Return the other names, anywhere in a module, of tensors that get a layout, with it."""
    layouts = {id(slot.tensor): layout for slot, layout in wanted}
    known = {(id(slot.module), slot.key) for slot, _ in wanted}
    return [
        (slot, layouts[id(slot.tensor)])
        for slot in find_slots(module)
        if id(slot.tensor) in layouts and (id(slot.module), slot.key) not in known
    ]


def _distribute(tensor: torch.Tensor, layout: Layout, src_data_rank: int | None) -> Any:
    distributed = distribute_tensor(
        tensor.detach(),
        layout.mesh,
        layout.placements,
        src_data_rank=src_data_rank,
        shard_order=layout.shard_order,
    )
    if isinstance(tensor, nn.Parameter):
        result: torch.Tensor = nn.Parameter(distributed, tensor.requires_grad)
    else:
        result = distributed.requires_grad_(tensor.requires_grad)
    # Attributes that users set on a parameter (a learning rate, a flag) are kept.
    for name, value in user_attributes(tensor).items():
        if name not in vars(result):
            setattr(result, name, value)
    return result
