"""input_reshard: keep a part of a module's inputs for the backward, rather than all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.core.checks import as_int
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Shard
from shardwise.dtensor.tensor import DTensor
from shardwise.parallel.plan_spec import PlanError
from shardwise.parallel.styles import as_one_axis_mesh
from shardwise.redistribute.autograd import redistribute_local
from shardwise.torch_internals import as_local, pytree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh


def input_reshard(
    module: nn.Module,
    tp_device_mesh: DeviceMesh | TorchMesh,
    input_reshard_dim: int | None = None,
) -> nn.Module:
    """Save memory: of inputs that are the same on every rank, each rank keeps one part.

    The inputs of a tensor-parallel module are whole on every rank, and autograd keeps them for the
    backward. With this, each rank keeps its part, and the backward gathers them again: an
    all-gather for each operator that needs an input.

    Arguments:
        module: a module whose inputs are whole on every rank of the mesh. A plain tensor is assumed
            to be so, as in torch; a DTensor that is split is left alone.
        tp_device_mesh: the axis of tensor parallelism.
        input_reshard_dim: the dim that is split, of inputs that have it; with None nothing is done.

    Returns:
        The module itself.
    """
    if input_reshard_dim is None:
        return module
    dim = as_int(input_reshard_dim)
    if dim is None:
        raise PlanError(f"input_reshard_dim: expected an int or None, got {input_reshard_dim!r}")
    resharding = _Resharding(as_one_axis_mesh(tp_device_mesh), dim, [])
    module.register_forward_pre_hook(resharding.begin, with_kwargs=True)
    module.register_forward_hook(resharding.end, always_call=True)
    return module


@dataclass(frozen=True, slots=True)
class _Part:
    """This rank's part of a tensor that autograd would keep."""

    piece: torch.Tensor
    split: Layout
    whole: Layout


class _Forward:
    """One forward of a module: the inputs whose memory autograd should not keep."""

    def __init__(self, mesh: DeviceMesh, dim: int, inputs: list[torch.Tensor]) -> None:
        self._mesh, self._dim = mesh, dim
        # Held until the forward ends, so that no other tensor gets their memory meanwhile.
        self._inputs = {_memory(each): each for each in inputs}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()

    def end(self) -> None:
        self._hooks.__exit__()
        self._inputs.clear()  # not later: what autograd keeps holds this object, for `_pack`

    def _pack(self, tensor: torch.Tensor) -> Any:
        with as_local():
            local = tensor.detach().as_subclass(torch.Tensor)
            if not local.dim() or _memory(local) not in self._inputs:
                return tensor
            dim = self._dim if -local.dim() <= self._dim < local.dim() else 0
            whole = Layout(self._mesh, local.shape)
            split = Layout.from_placements(self._mesh, local.shape, [Shard(dim)])
            return _Part(redistribute_local(local, whole, split).clone(), split, whole)


def _unpack(kept: Any) -> Any:
    if not isinstance(kept, _Part):
        return kept
    with as_local(), torch.no_grad():
        return redistribute_local(kept.piece, kept.split, kept.whole)


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return where the elements of a tensor are: the same for a view of all of them."""
    with as_local():
        return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.numel()


@dataclass(frozen=True, slots=True)
class _Resharding:
    """The hooks of one module.

    Arguments:
        running: its forwards that have begun, the innermost last.
    """

    mesh: DeviceMesh
    dim: int
    running: list[_Forward]

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a forward: from now on tensors that autograd keeps are looked at."""
        inputs = [each for each in pytree.tree_leaves((args, kwargs)) if self._is_whole(each)]
        self.running.append(_Forward(self.mesh, self.dim, inputs))

    def end(self, module: nn.Module, args: Any, outputs: Any) -> None:
        """End a forward, also one that has raised."""
        if self.running:
            self.running.pop().end()

    def _is_whole(self, value: Any) -> bool:
        if isinstance(value, DTensor):
            return value._layout.is_replicated and value._layout.mesh is self.mesh
        return isinstance(value, torch.Tensor)
