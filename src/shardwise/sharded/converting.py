"""Between explicit shards and layouts: which shards are a layout, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch

from shardwise.box import Box
from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh, as_mesh
from shardwise.placement import Shard as SplitAlong
from shardwise.sharded import building
from shardwise.sharded.errors import ShardedTensorError
from shardwise.sharded.group import GroupLike, as_group
from shardwise.sharded.metadata import ShardMetadata, TensorProperties
from shardwise.sharded.moving import Held
from shardwise.sharded.specs import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec
from shardwise.tensor import DTensor, unwrap

if TYPE_CHECKING:
    from shardwise.sharded.tensor import ShardedTensor


# ---- from shards to a layout


def to_dtensor(tensor: ShardedTensor, device_mesh: DeviceMesh | None = None) -> DTensor:
    """The same tensor as a DTensor; it shares memory if every rank holds one shard."""
    layout = layout_of(tensor, None if device_mesh is None else as_mesh(device_mesh))
    if layout is None:
        where = "" if device_mesh is None else f" on {device_mesh!r}"
        raise ShardedTensorError(
            f"to_dtensor: these shards are no layout of a DTensor{where}: each rank's must make up "
            "one box, and the boxes chunks of dims, as torch.chunk cuts them; "
            f"x.reshard({suggested(tensor)}) makes them so"
        )
    return DTensor.from_local(
        _as_one(tensor, layout), layout.mesh, layout.placements, shape=layout.shape
    )


def _as_one(tensor: ShardedTensor, layout: Layout) -> torch.Tensor:
    """This rank's shards as the one piece that a layout gives it."""
    shape = layout.local_shape()
    tensors = tensor._tensors()
    if len(tensors) == 1:
        return tensors[0] if tuple(tensors[0].shape) == shape else tensors[0].reshape(shape)
    whole = tensor._like().new_zeros(shape)
    if not tensors:
        return whole.requires_grad_(tensor.requires_grad)
    frame = layout.box()
    for box, part in zip(tensor._held.by(tensor._group.rank), tensors, strict=True):
        if not box.is_empty:
            whole[box.within(frame).slices] = part
    return whole


def layout_of(tensor: ShardedTensor, mesh: DeviceMesh | None = None) -> Layout | None:
    """The layout that the shards are, on this mesh or any; None if they are none."""
    spec = tensor._sharding_spec
    dim = spec.dim % len(tensor.shape) if isinstance(spec, ChunkShardingSpec) else None
    ranks = tensor._group.ranks
    if mesh is None:
        return _found(tensor._held, tuple(tensor.shape), ranks, tensor.device.type, dim)
    return _found_on(tensor._held, tuple(tensor.shape), ranks, mesh)


@lru_cache(maxsize=1024)
def _found(
    held: Held, size: tuple[int, ...], ranks: tuple[int, ...], device: str, cut_dim: int | None
) -> Layout | None:
    boxes = _boxes(held, ranks)
    if boxes is None:
        return None
    order = {**dict.fromkeys(ranks, 0), **{rank: at for at, rank in enumerate(held.owners)}}
    for dim in range(len(size)) if cut_dim is None else [cut_dim]:
        # Empty chunks come last; among themselves in the order in which they were given.
        line = sorted(
            ranks, key=lambda rank: (boxes[rank].is_empty, boxes[rank].start[dim], order[rank])
        )
        layout = _matching(DeviceMesh(device, line), [dim], size, boxes)
        if layout is not None:
            return layout
    return _grid(size, ranks, device, boxes)


@lru_cache(maxsize=1024)
def _found_on(
    held: Held, size: tuple[int, ...], ranks: tuple[int, ...], mesh: DeviceMesh
) -> Layout | None:
    boxes = _boxes(held, ranks)
    if boxes is None or set(mesh.mesh.flatten().tolist()) != set(ranks):
        return None
    for dims in product(range(len(size)), repeat=mesh.ndim):
        layout = _matching(mesh, dims, size, boxes)
        if layout is not None:
            return layout
    return None


def _grid(
    size: tuple[int, ...], ranks: tuple[int, ...], device: str, boxes: dict[int, Box]
) -> Layout | None:
    """Several dims cut at once: an axis of a mesh for each."""
    starts = [sorted({box.start[dim] for box in boxes.values()}) for dim in range(len(size))]
    dims = [dim for dim, each in enumerate(starts) if len(each) > 1]
    shape = [len(starts[dim]) for dim in dims]
    if len(dims) < 2 or math.prod(shape) != len(ranks):
        return None
    places = np.full(shape, -1, dtype=np.int64)
    for rank in ranks:
        places[tuple(starts[dim].index(boxes[rank].start[dim]) for dim in dims)] = rank
    if (places < 0).any():
        return None
    return _matching(DeviceMesh(device, places), dims, size, boxes)


def _matching(
    mesh: DeviceMesh, dims: Sequence[int], size: tuple[int, ...], boxes: dict[int, Box]
) -> Layout | None:
    """The layout that splits these dims over the axes, if every rank then has its box."""
    layout = Layout.from_placements(mesh, size, [SplitAlong(dim) for dim in dims])
    for rank, box in boxes.items():
        place = mesh.coordinate_of(rank)
        assert place is not None, "the mesh has all ranks"
        expected = layout.box(place)
        if expected != box and not (expected.is_empty and box.is_empty):
            return None
    return layout


def _boxes(held: Held, ranks: tuple[int, ...]) -> dict[int, Box] | None:
    """The one box that each rank's shards make up; None if they do not."""
    if not held.boxes[0].start:
        return None if len(ranks) > 1 else {ranks[0]: held.boxes[0]}
    found = {}
    for rank in ranks:
        own = held.by(rank)
        some = [box for box in own if not box.is_empty] or own[:1] or [_nothing(held)]
        start = tuple(map(min, *(box.start for box in some))) if len(some) > 1 else some[0].start
        stop = tuple(map(max, *(box.stop for box in some))) if len(some) > 1 else some[0].stop
        box = Box(start, stop)
        if math.prod(box.shape) != sum(math.prod(each.shape) for each in some):
            return None
        found[rank] = box
    return found


def _nothing(held: Held) -> Box:
    corner = (0,) * len(held.boxes[0].start)
    return Box(corner, corner)


def suggested(tensor: ShardedTensor) -> str:
    """A spec that is a layout, in words."""
    dim = max(range(len(tensor.shape)), key=lambda dim: tensor.shape[dim], default=0)
    placements = [f"rank:{rank}/{tensor.device.type}" for rank in tensor._group.ranks]
    return f"ChunkShardingSpec({dim}, {placements})"


# ---- from a layout to shards


def from_dtensor(tensor: DTensor, process_group: GroupLike = None) -> ShardedTensor:
    """The same tensor as explicit shards, which share its memory."""
    if not isinstance(tensor, DTensor):
        raise ShardedTensorError(f"tensor: expected a DTensor, got {type(tensor).__name__}")
    layout = tensor.layout
    mesh = layout.mesh
    group = as_group(mesh if process_group is None else process_group)
    if set(group.ranks) != set(mesh.mesh.flatten().tolist()):
        raise ShardedTensorError(
            f"process_group: expected the ranks of the DTensor's mesh {mesh!r}, got {group.ranks}"
        )
    whole = [
        mesh.axis_name(axis)
        for axis, each in enumerate(layout.placements)
        if not each.is_shard() and mesh.shape[axis] > 1
    ]
    if whole:
        raise ShardedTensorError(
            f"tensor: expected every element on one rank, got {layout!r}, which is not split over "
            f"axis {', '.join(whole)}; x.redistribute(placements=[Shard(dim), ...]) first"
        )
    local = unwrap(tensor)
    properties = TensorProperties(dtype=local.dtype, requires_grad=local.requires_grad)
    spec = _spec(layout)
    metadata = spec.build_metadata(layout.shape, properties)
    pieces = [local[here.slices] for _, here in layout.boxes()] if layout.is_cut else [local]
    return building.made(metadata, spec, pieces, group)


@lru_cache(maxsize=1024)
def _spec(layout: Layout) -> ShardingSpec:
    mesh = layout.mesh
    ranks = mesh.mesh.flatten().tolist()
    if mesh.ndim == 1 and mesh.size() > 1 and not layout.is_cut:
        (split,) = layout.placements
        assert isinstance(split, SplitAlong), "checked"
        return ChunkShardingSpec(split.dim, [f"rank:{rank}/{mesh.device_type}" for rank in ranks])
    shards = []
    for rank in ranks:
        boxes = [box for box, _ in layout.boxes(mesh.coordinate_of(rank))]
        shards += [ShardMetadata.of_box(box, f"rank:{rank}/{mesh.device_type}") for box in boxes]
    return EnumerableShardingSpec(shards)
