"""`distribute_tensor` and `distribute_module`: DTensors of plain tensors and modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.api.optimizers import note_replaced
from shardwise.api.wrappers import check_unwrapped
from shardwise.comm import communicator
from shardwise.core.checks import as_int
from shardwise.core.errors import LayoutError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh, mesh_or_current
from shardwise.core.placement import Placement, Replicate
from shardwise.dtensor.local_shards import check_supported, shard_stride, waited
from shardwise.dtensor.tensor import DTensor, wrap
from shardwise.redistribute.autograd import redistribute_local
from shardwise.torch_internals import own_buffers, own_parameters

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

Placements = Sequence[Placement]


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | TorchMesh | None = None,
    placements: Placements | None = None,
    *,
    src_data_rank: int | None = 0,
    shard_order: Any = None,
) -> DTensor:
    """Make a DTensor of a tensor that one rank, or every rank, has whole.

    Arguments:
        tensor: a leaf. On ranks other than the source only its shape, its dtype and the order of
            its dims in memory (such as `torch.channels_last`) count.
        device_mesh: the mesh of the result; by default that of `with mesh:`. On a rank outside of
            it the result has no data, and operators on it do nothing.
        placements: one per axis of the mesh; all `Replicate()` by default.
        src_data_rank: the position, along every axis, of the rank whose data is distributed; None
            lets each rank take its shard of its own tensor, without communication.
        shard_order: for each dim that several axes split, those axes outer to inner.
    """
    mesh = mesh_or_current(device_mesh)
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"tensor: expected a tensor, got {type(tensor).__name__}")
    tensor = waited(tensor)
    check_supported("tensor", tensor)
    placements = [Replicate()] * mesh.ndim if placements is None else placements
    layout = Layout.from_placements(mesh, tensor.shape, placements, shard_order)
    if isinstance(tensor, DTensor):
        if tensor._layout is layout:
            return tensor
        raise LayoutError(
            f"tensor: it is a DTensor {tensor._layout!r} already; "
            "move it with tensor.redistribute(mesh, placements)"
        )
    if not tensor.is_leaf:
        raise LayoutError(
            "tensor: expected a leaf, got a tensor with a history; detach() it, or use "
            "DTensor.from_local(tensor, mesh).redistribute(...), which is differentiable"
        )
    source = None if src_data_rank is None else _as_source(src_data_rank, mesh)
    if mesh.get_coordinate() is None:
        return DTensor._outside(layout, tensor.detach(), requires_grad=tensor.requires_grad)
    with torch.no_grad():
        whole = tensor.detach()
        if mesh.is_abstract or whole.is_meta:
            local = whole.new_empty(layout.local_shape())
        elif source is None:
            return own_shard(tensor, layout)
        else:
            local = _scatter_shard(whole, layout, source)
        result = wrap(_in_order_of(whole, local, layout), layout)
    result.requires_grad = tensor.requires_grad
    return result


def _in_order_of(whole: torch.Tensor, local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a shard with its dims in memory in the order of the whole tensor: such as
    `torch.channels_last`. A tensor with gaps or overlaps gives a contiguous shard."""
    if whole.is_contiguous():
        return local
    strides = shard_stride(layout, whole.stride())
    if strides is None or strides == local.stride():
        return local
    return local.new_empty_strided(local.shape, strides).copy_(local)


def own_shard(tensor: torch.Tensor, layout: Layout) -> DTensor:
    """Make a DTensor of a tensor that every rank has whole: each takes its shard, as a copy."""
    if layout.mesh.get_coordinate() is None:
        return DTensor._outside(layout, tensor.detach(), requires_grad=tensor.requires_grad)
    with torch.no_grad():
        whole = tensor.detach()
        local: torch.Tensor = redistribute_local(whole, Layout(layout.mesh, layout.shape), layout)
        shares = local.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        local = _in_order_of(whole, local.clone() if shares else local, layout)
        result = wrap(local, layout)
    result.requires_grad = tensor.requires_grad
    return result


def _as_source(src_data_rank: int, mesh: DeviceMesh) -> int:
    source = as_int(src_data_rank)
    if source is None or not 0 <= source < min(mesh.shape):
        raise LayoutError(
            f"src_data_rank: expected a position on every axis of {mesh!r}, or None; "
            f"got {src_data_rank!r}"
        )
    return source


def _scatter_shard(whole: torch.Tensor, layout: Layout, source: int) -> torch.Tensor:
    """Scatter from the source over the axes that split the tensor; then broadcast over the others.

    In a pending sum, the source contributes its data and the other ranks zeros.
    """
    mesh = layout.mesh
    place = mesh.get_coordinate()
    assert place is not None, "a rank outside takes no part"
    split = tuple(axis for axis, each in enumerate(layout.placements) if each.is_shard())
    others = tuple(axis for axis in range(mesh.ndim) if axis not in split)
    bare = layout.relaid(partial={})
    piece = whole.new_empty(bare.local_shape())
    if split and all(place[axis] == source for axis in others):
        group = communicator(mesh, split)
        root = group.ranks.index(
            mesh.rank_at([source if axis in split else place[axis] for axis in range(mesh.ndim)])
        )
        pieces = None
        if group.ranks[root] == mesh.get_rank():
            places = map(mesh.coordinate_of, group.ranks)
            pieces = [bare.piece_of(whole, place).contiguous() for place in places]
        piece = group.scatter(piece, pieces, root)
    elif not split:
        piece = whole.contiguous()
    if others:
        group = communicator(mesh, others)
        first = [source if axis in others else place[axis] for axis in range(mesh.ndim)]
        piece = group.broadcast(piece, group.ranks.index(mesh.rank_at(first)))
    elif not split:
        piece = piece.clone()
    return redistribute_local(piece, bare, layout)  # type: ignore[no-any-return]


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | TorchMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None = None,
    output_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None = None,
) -> nn.Module:
    """Make the parameters and buffers of a module DTensors, in place.

    Arguments:
        device_mesh: the mesh of the parameters; by default that of `with mesh:`.
        partition_fn: called with each submodule's name, the submodule and the mesh; it makes its
            parameters DTensors. Parameters that it leaves plain are replicated; tied parameters
            stay tied.
        input_fn: called with the module, the tuple of its inputs and the mesh before each forward.
        output_fn: called with the module, its outputs and the mesh after each forward.
    """
    mesh = mesh_or_current(device_mesh)
    check_unwrapped("distribute_module", module)
    slots = [
        (parameter, submodule, key)
        for submodule in module.modules()
        for key, parameter in own_parameters(submodule).items()
        if parameter is not None
    ]
    if partition_fn is not None:
        for name, submodule in module.named_modules():
            partition_fn(name, submodule, mesh)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for parameter, submodule, key in slots:
        now = own_parameters(submodule).get(key)
        if isinstance(now, DTensor):
            made[parameter] = now
            if now is not parameter:
                note_replaced(parameter, key)
    for submodule in module.modules():
        _replicate(submodule, mesh, made)
    if input_fn is not None:
        module.register_forward_pre_hook(functools.partial(_enter, input_fn, mesh))
    if output_fn is not None:
        module.register_forward_hook(functools.partial(_leave, output_fn, mesh))
    return module


# Hooks are no closures, so that modules can be pickled.


def _enter(input_fn: Any, mesh: DeviceMesh, module: nn.Module, inputs: Any) -> Any:
    return input_fn(module, inputs, mesh)


def _leave(output_fn: Any, mesh: DeviceMesh, module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return output_fn(module, outputs, mesh)


def _replicate(module: nn.Module, mesh: DeviceMesh, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """Replicate a module's own parameters and buffers that are still plain; not of submodules.

    Arguments:
        made: maps each plain parameter to the DTensor that replaces it; new ones are added. So a
            parameter that modules share is replaced once.
    """
    for name, parameter in list(own_parameters(module).items()):
        if parameter is not None and not isinstance(parameter, DTensor):
            if parameter not in made:
                whole = distribute_tensor(parameter.detach(), mesh)
                made[parameter] = nn.Parameter(whole, parameter.requires_grad)
                note_replaced(parameter, name)
            module.register_parameter(name, made[parameter])
    for name, buffer in list(own_buffers(module).items()):
        if buffer is not None and not isinstance(buffer, DTensor):
            own_buffers(module)[name] = distribute_tensor(buffer, mesh)
