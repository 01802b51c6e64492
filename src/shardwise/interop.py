"""Conversion to and from torch's own DTensor, without copying. Only this module imports torch's.

Both libraries have the same placements. They differ in two cases: torch has no placement for a dim
made of units, or of pieces that `torch.chunk` would not make; and its `_StridedShard` gives other
shards than nested chunks for some sizes that the axes do not divide. `to_torch` refuses both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard as TorchStridedShard

from shardwise.core.box import Range, chunk
from shardwise.core.cut import nonempty_ranges
from shardwise.core.errors import LayoutError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Partial, Placement, Shard, _StridedShard, as_placement
from shardwise.dtensor.local_shards import check_shard
from shardwise.dtensor.tensor import DTensor, unwrap, wrap


def from_torch(tensor: TorchDTensor) -> DTensor:
    """Return a DTensor of torch as one of shardwise: the same local memory, mesh and layout;
    differentiable."""
    if not isinstance(tensor, TorchDTensor):
        raise LayoutError(f"tensor: expected torch's DTensor, got {type(tensor).__name__}")
    mesh = DeviceMesh.from_torch(tensor.device_mesh)
    placements = [as_placement(each, "tensor: its placements") for each in tensor.placements]
    layout = Layout.from_placements(mesh, tensor.shape, placements)
    local = tensor.to_local()
    check_shard(local, layout)
    result = wrap(local.view_as(local), layout)
    if tensor.is_leaf and tensor.requires_grad:
        result = wrap(local.detach(), layout)
        result.requires_grad = True
    return result


def to_torch(tensor: DTensor) -> TorchDTensor:
    """Return a DTensor of shardwise as one of torch: the same local memory, mesh and layout;
    differentiable.

    It needs ranks of torch.distributed: `simulate` has no meshes of torch.
    """
    if not isinstance(tensor, DTensor):
        raise LayoutError(f"tensor: expected a shardwise DTensor, got {type(tensor).__name__}")
    layout = tensor.mesh_layout
    placements = _torch_placements(layout)
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


def placement_to_torch(placement: Placement) -> Any:
    """Return torch's placement of the same meaning; refuse one that cuts a dim in pieces.

    For functions of torch: those of shardwise take the placements of both.
    """
    placement = as_placement(placement, "placement")
    match placement:
        case Shard(dim):
            if placement.pieces is not None or placement.unit != 1:
                raise LayoutError(
                    f"placement: torch has none for a dim that is cut in pieces: {placement}"
                )
            if isinstance(placement, _StridedShard):
                return TorchStridedShard(dim, split_factor=placement.split_factor)
            return TorchShard(dim)
        case Partial(op):
            return TorchPartial(op)
    return TorchReplicate()


@lru_cache(maxsize=1024)
def _torch_placements(layout: Layout) -> tuple[Any, ...]:
    """Return torch's placements with the same shards; refuse a layout that torch has none for."""
    placements: list[Any] = []
    for placement in layout.placements:
        match placement:
            case Shard(dim):
                factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
                if len(layout.shard_order[dim]) == 1:
                    factor = len(layout.cuts[dim] or (None,))
                theirs = TorchStridedShard(dim, split_factor=factor)
                placements.append(theirs if factor > 1 else TorchShard(dim))
            case Partial(op):
                placements.append(TorchPartial(op))
            case _:
                placements.append(TorchReplicate())
    for dim, axes in enumerate(layout.shard_order):
        factors = {axis: getattr(placements[axis], "split_factor", 1) for axis in sorted(axes)}
        if layout.cuts[dim] is not None or set(factors.values()) - {1}:
            _check_shards(layout, dim, factors)
    return tuple(placements)


def _check_shards(layout: Layout, dim: int, factors: dict[int, int]) -> None:
    """Check that torch's placements give the shards of a layout along one dim."""
    mesh = layout.mesh
    for place in product(*(range(mesh.shape[axis]) for axis in factors)):
        coordinate = [0] * mesh.ndim
        theirs = [(0, layout.shape[dim])]
        for (axis, factor), index in zip(factors.items(), place, strict=True):
            coordinate[axis] = index
            # _StridedShard: one share of each of `factor` chunks, one after the other.
            chunks = [_take_chunk(theirs, factor, at) for at in range(factor)]
            theirs = [
                each for part in chunks for each in _take_chunk(part, mesh.shape[axis], index)
            ]
        ours = layout.ranges(dim, coordinate)
        if nonempty_ranges(theirs) != nonempty_ranges(ours):
            kind = "" if layout.cuts[dim] is None else ", which is cut in pieces"
            raise LayoutError(
                f"tensor: torch has no placement for dim {dim} of {layout!r}{kind}: at "
                f"{tuple(coordinate)} it would have the indices {theirs}, and shardwise has {ours};"
                f" x.redistribute() it to Shard({dim}) first"
            )


def _take_chunk(ranges: Sequence[Range], count: int, index: int) -> list[Range]:
    """Return one of the chunks that `torch.chunk` makes of some ranges, one after the other."""
    start, stop = chunk(0, sum(end - first for first, end in ranges), count, index)
    found, offset = [], 0
    for first, end in ranges:
        low, high = max(start - offset, 0), min(stop - offset, end - first)
        if low < high:
            found.append((first + low, first + high))
        offset += end - first
    return found
