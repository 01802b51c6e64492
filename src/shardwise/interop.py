"""Conversion to and from torch's own DTensor, without copying. Only this module imports torch's.

torch encodes the order of nested shards in placements (`_StridedShard`); shardwise has it in the
layout.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from shardwise.core.errors import LayoutError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Partial, Placement, Replicate, Shard
from shardwise.dtensor.tensor import DTensor, unwrap, wrap


def from_torch(tensor: TorchDTensor) -> DTensor:
    """Return a DTensor of torch as one of shardwise: the same local memory, mesh and layout;
    differentiable."""
    if not isinstance(tensor, TorchDTensor):
        raise LayoutError(f"tensor: expected torch's DTensor, got {type(tensor).__name__}")
    mesh = DeviceMesh.from_torch(tensor.device_mesh)
    placements: list[Placement] = []
    order: dict[int, list[int]] = {}
    for axis in reversed(range(mesh.ndim)):
        theirs = tensor.placements[axis]
        if isinstance(theirs, TorchShard | _StridedShard):
            axes = order.setdefault(theirs.dim % tensor.dim(), [])
            axes.insert(_position(theirs, axes, mesh), axis)
            placements.append(Shard(theirs.dim))
        elif isinstance(theirs, TorchPartial) and type(theirs) is TorchPartial:
            placements.append(Partial(theirs.reduce_op))
        elif isinstance(theirs, TorchReplicate):
            placements.append(Replicate())
        else:
            raise LayoutError(
                f"tensor: its placement {theirs} has no meaning outside torch's operators; "
                "redistribute it to Shard, Replicate or Partial first"
            )
    layout = Layout.from_placements(mesh, tensor.shape, placements[::-1], order)
    local = tensor.to_local()
    result = wrap(local.view_as(local), layout)
    if tensor.is_leaf and tensor.requires_grad:
        result = wrap(local.detach(), layout)
        result.requires_grad = True
    return result


def _position(theirs: Any, axes: list[int], mesh: DeviceMesh) -> int:
    """Return the position of an axis among later axes that split the same dim, outer to inner."""
    factor = theirs.split_factor if isinstance(theirs, _StridedShard) else 1
    for position in range(len(axes) + 1):
        if math.prod(mesh.shape[axis] for axis in axes[:position]) == factor:
            return position
    raise LayoutError(f"tensor: {theirs} fits no order of the axes of {mesh!r}")


def to_torch(tensor: DTensor) -> TorchDTensor:
    """Return a DTensor of shardwise as one of torch: the same local memory, mesh and layout;
    differentiable.

    It needs ranks of torch.distributed: `simulate` has no meshes of torch.
    """
    if not isinstance(tensor, DTensor):
        raise LayoutError(f"tensor: expected a shardwise DTensor, got {type(tensor).__name__}")
    layout = tensor.mesh_layout
    placements: list[Any] = []
    for axis, placement in enumerate(layout.placements):
        match placement:
            case Shard(dim):
                if layout.cuts[dim] is not None:
                    raise LayoutError(
                        f"tensor: dim {dim} of {layout!r} is cut in pieces, for which torch has no "
                        f"placement; x.redistribute() it to Shard({dim}) first"
                    )
                axes = layout.shard_order[dim]
                before = axes[: axes.index(axis)]
                factor = math.prod(layout.mesh.shape[each] for each in before if each > axis)
                placements.append(
                    _StridedShard(dim, split_factor=factor) if factor > 1 else TorchShard(dim)
                )
            case Partial(op):
                placements.append(TorchPartial(op))
            case _:
                placements.append(TorchReplicate())
    local = unwrap(tensor)
    if tensor.is_leaf and tensor.requires_grad:
        local = local.detach()
    result = TorchDTensor.from_local(
        local,
        layout.mesh.to_torch(),
        placements,
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=tensor.stride(),
    )
    if tensor.is_leaf and tensor.requires_grad:
        result.requires_grad_(True)
    return result
