"""Parameters and buffers of a module become DTensors, in place, with their ties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardwise.distribute import distribute_tensor
from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh
from shardwise.optimizers import note_replaced
from shardwise.parallel.names import PlanError, all_modules, joined
from shardwise.placement import Placement
from shardwise.tensor import DTensor
from shardwise.torch_internals import own_buffers, own_parameters


@dataclass(frozen=True)
class Slot:
    """Where a module keeps a parameter or buffer."""

    path: str
    module: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        """What is there now."""
        found = own_parameters(self.module).get(self.key)
        if found is None:
            found = own_buffers(self.module)[self.key]  # type: ignore[assignment]
        assert found is not None, "only slots that hold something are listed"
        return found

    def put(self, tensor: torch.Tensor) -> None:
        """Replace it."""
        if own_parameters(self.module).get(self.key) is not None:
            own_parameters(self.module)[self.key] = tensor  # type: ignore[assignment]
        else:
            own_buffers(self.module)[self.key] = tensor


def slots(module: nn.Module, prefix: str = "") -> list[Slot]:
    """Every parameter and buffer by every name it has: a tied one comes several times."""
    found = []
    for path, submodule in all_modules(module, prefix):
        for held in (own_parameters(submodule), own_buffers(submodule)):
            for key, tensor in held.items():
                if tensor is not None:
                    found.append(Slot(joined(path, key), submodule, key))
    return found


def check_ties(wanted: Sequence[tuple[Slot, Layout]]) -> None:
    """Refuse to lay out one tensor in two ways."""
    seen: dict[int, tuple[Slot, Layout]] = {}
    for slot, layout in wanted:
        other, before = seen.setdefault(id(slot.tensor), (slot, layout))
        if before is not layout:
            raise PlanError(
                f"{slot.path}: it is tied to {other.path}, and the plan lays one out as {layout!r} "
                f"and the other as {before!r}; give both the same placements, or untie them"
            )


def layout_for(slot: Slot, mesh: DeviceMesh, placements: Sequence[Placement]) -> Layout:
    """The layout that a plan wants, with errors that name the parameter."""
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
    if isinstance(tensor, DTensor) and tensor._layout is not layout:
        before = tensor._layout
        moved = before.mesh is not mesh
        raise PlanError(
            f"{slot.path}: it is a DTensor {before!r} {f'on {before.mesh!r} ' * moved}already, and "
            f"the plan wants {layout!r}{f' on {mesh!r}' * moved}; lay a module out once, or "
            "redistribute the parameter yourself"
        )
    if is_lazy(tensor):
        raise PlanError(
            f"{slot.path}: it is lazy and has no shape yet; run a forward first, in one process"
        )
    return layout


def place(wanted: Sequence[tuple[Slot, Layout]], src_data_rank: int | None) -> None:
    """Make DTensors of parameters and buffers, in their order; ties are kept.

    Every rank of the mesh calls it. What they get is the data of the rank `src_data_rank`.
    """
    made: dict[int, torch.Tensor] = {}
    kept = [(slot, slot.tensor, layout) for slot, layout in wanted]  # so that no id is used again
    for slot, tensor, layout in kept:
        if isinstance(tensor, DTensor):
            continue
        if id(tensor) not in made:
            made[id(tensor)] = _placed(tensor, layout, src_data_rank)
            note_replaced(tensor, slot.path)
        slot.put(made[id(tensor)])


def _placed(tensor: torch.Tensor, layout: Layout, src_data_rank: int | None) -> torch.Tensor:
    piece = distribute_tensor(
        tensor.detach(),
        layout.mesh,
        layout.placements,
        src_data_rank=src_data_rank,
        shard_order=layout.shard_order,
    )
    if isinstance(tensor, nn.Parameter):
        result: torch.Tensor = nn.Parameter(piece, tensor.requires_grad)
    else:
        result = piece.requires_grad_(tensor.requires_grad)
    _keep_attributes(tensor, result)
    return result


def _keep_attributes(before: torch.Tensor, after: torch.Tensor) -> None:
    """What users hang on a parameter (a learning rate, a flag) goes on to the new one."""
    mine: Mapping[str, object] = vars(before)
    for name, value in mine.items():
        if name not in vars(after):
            setattr(after, name, value)
