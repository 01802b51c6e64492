"""To and from torch's own DTensor, without copying. The one module that knows it.

torch writes the order of nested shards into placements (`_StridedShard`); ours is the layout's.
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

from shardwise.errors import LayoutError
from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh
from shardwise.placement import Partial, Placement, Replicate, Shard
from shardwise.tensor import DTensor, unwrap, wrap


def from_torch(tensor: TorchDTensor) -> DTensor:
    """Our DTensor of torch's: the same local memory, mesh and layout; differentiable."""
    if not isinstance(tensor, TorchDTensor):
        raise LayoutError(f"tensor: expected torch's DTensor, got {type(tensor).__name__}")
    mesh = DeviceMesh.from_torch(tensor.device_mesh)
    placements: list[Placement] = []
    order: dict[int, list[int]] = {}
    for axis in reversed(range(mesh.ndim)):
        theirs = tensor.placements[axis]
        if isinstance(theirs, TorchShard | _StridedShard):
            axes = order.setdefault(theirs.dim % tensor.dim(), [])
            axes.insert(_place(theirs, axes, mesh), axis)
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


def _place(theirs: Any, axes: list[int], mesh: DeviceMesh) -> int:
    """Where an axis stands among later axes that split the same dim, outer to inner."""
    factor = theirs.split_factor if isinstance(theirs, _StridedShard) else 1
    for position in range(len(axes) + 1):
        if math.prod(mesh.shape[axis] for axis in axes[:position]) == factor:
            return position
    raise LayoutError(f"tensor: {theirs} fits no order of the axes of {mesh!r}")


def to_torch(tensor: DTensor) -> TorchDTensor:
    """torch's DTensor of ours: the same local memory, mesh and layout; differentiable.

    Needs ranks of torch.distributed: there is none of torch's meshes in `simulate`.
    """
    if not isinstance(tensor, DTensor):
        raise LayoutError(f"tensor: expected a shardwise DTensor, got {type(tensor).__name__}")
    layout = tensor.layout
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
                later = math.prod(layout.mesh.shape[each] for each in before if each > axis)
                strided = later > 1
                placements.append(
                    _StridedShard(dim, split_factor=later) if strided else TorchShard(dim)
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
