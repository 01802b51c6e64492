"""Sharded tensors as DTensors: which shards form a layout, and the conversion there and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from operator import add
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from shardwise.core.box import Box
from shardwise.core.errors import ShardedTensorError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh, as_mesh
from shardwise.core.placement import Shard
from shardwise.dtensor.tensor import DTensor, unwrap, wrap
from shardwise.sharded.base import ShardedTensorCore
from shardwise.sharded.group import GroupLike, ShardOwnership, as_rank_group
from shardwise.sharded.metadata import (
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from shardwise.sharded.specs import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec

_Core = TypeVar("_Core", bound=ShardedTensorCore)
_CONTAINERS = list, tuple, dict

# ---- from shards to a layout


def to_dtensor(tensor: ShardedTensorCore, device_mesh: DeviceMesh | None = None) -> DTensor:
    """Return a sharded tensor as a DTensor. Both share memory, if no rank holds several shards."""
    layout = find_layout(tensor, None if device_mesh is None else as_mesh(device_mesh))
    if layout is None:
        where = "" if device_mesh is None else f" on {device_mesh!r}"
        raise ShardedTensorError(
            f"to_dtensor: these shards form no layout of a DTensor{where}: the shards of each rank "
            "must make up one box, and the boxes must be chunks of dims, as torch.chunk cuts them; "
            f"{suggest_reshard(tensor)}"
        )
    return wrap_as_dtensor(tensor, layout)


def wrap_as_dtensor(tensor: ShardedTensorCore, layout: Layout) -> DTensor:
    """Return a sharded tensor as a DTensor of the layout that its shards form."""
    local = _join_shards(tensor, layout)
    return wrap(local.view_as(local), layout)


def _join_shards(tensor: ShardedTensorCore, layout: Layout) -> torch.Tensor:
    """Join this rank's shards into the one local tensor that the layout gives to this rank."""
    shards = tensor._local_shards
    shape = _local_piece(layout, tensor._group.rank).shape
    if shares_memory(tensor):
        if not shards:
            return tensor._get_placeholder(shape)
        local = shards[0].tensor
        return local if local.shape == shape else local.reshape(shape)
    if not shards:
        return tensor._get_placeholder(shape).clone()
    piece = tensor._prototype().new_zeros(shape)
    for inner, shard in zip(_boxes_in_piece(tensor, layout), shards, strict=True):
        # An empty shard is copied too, so that it gets a gradient when the others do.
        _part(piece, inner, shard.tensor.shape).copy_(shard.tensor)
    return piece


def shares_memory(tensor: ShardedTensorCore) -> bool:
    """Return whether the DTensor of a sharded tensor uses the memory of the shards. All ranks get
    the same answer."""
    owners = tensor._ownership.owners
    return len(set(owners)) == len(owners)


def from_local_piece(
    model: ShardedTensorCore, layout: Layout, local: torch.Tensor
) -> ShardedTensorCore:
    """Make a sharded tensor that is cut as `model` is, from this rank's piece.

    Arguments:
        layout: the layout that the shards of `model` form.
        local: the piece that the layout gives to this rank.
    """
    shards = model._local_shards
    if len(shards) == 1:
        own = shards[0].tensor.shape
        pieces = [local if local.shape == own else local.reshape(own)]
    else:
        pieces = _split_piece(model, layout, local)
    result = model._with_results(pieces or [local])
    result._cached_layout = model._cached_layout
    return result


def write_back(tensor: ShardedTensorCore, layout: Layout, local: torch.Tensor) -> None:
    """Copy a rank's piece, in which several shards were joined, back to the shards."""
    if not tensor._local_shards:  # raise the errors that other ranks raise
        tensor._get_placeholder(tuple(local.shape)).copy_(local)
    parts = _split_piece(tensor, layout, local)
    for target, part in zip(tensor._local_tensors(), parts, strict=True):
        target.copy_(part)


def _split_piece(
    tensor: ShardedTensorCore, layout: Layout, local: torch.Tensor
) -> list[torch.Tensor]:
    """Cut the piece that a layout gives to this rank into this rank's shards."""
    boxes = zip(_boxes_in_piece(tensor, layout), tensor._local_boxes(), strict=True)
    return [_part(local, inner, box.shape) for inner, box in boxes]


def _part(piece: torch.Tensor, inner: Box | None, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a box of a piece, as a view; for None, an empty part of this shape."""
    return piece.reshape(-1)[:0].view(shape) if inner is None else piece[inner.slices]


class _LocalPiece(NamedTuple):
    """The piece that a layout gives to a rank."""

    shape: tuple[int, ...]
    boxes: list[tuple[Box, Box]]
    """Each box of indices of the whole tensor, and the box in the piece where it is."""


@lru_cache(maxsize=1024)
def _local_piece(layout: Layout, rank: int) -> _LocalPiece:
    place = layout.mesh.coordinate_of(rank)
    return _LocalPiece(layout.local_shape(place), layout.boxes(place))


def _boxes_in_piece(tensor: ShardedTensorCore, layout: Layout) -> list[Box | None]:
    """Return, for each of this rank's shards, its box within the piece; None if it is empty."""
    boxes = _local_piece(layout, tensor._group.rank).boxes
    return [None if box.is_empty else _box_in_piece(box, boxes) for box in tensor._local_boxes()]


def _box_in_piece(box: Box, boxes: list[tuple[Box, Box]]) -> Box:
    """Convert a box of the whole tensor to the box that it occupies in a piece."""
    outer, in_piece = next(each for each in boxes if each[0].intersect(box) == box)
    inner = box.within(outer)
    start = tuple(map(add, in_piece.start, inner.start))
    return Box(start, tuple(map(add, start, inner.shape)))


def find_layout(tensor: ShardedTensorCore, mesh: DeviceMesh | None = None) -> Layout | None:
    """Return the layout that the shards form, on this mesh or on any; None if they form none."""
    ownership, ranks = tensor._ownership, tensor._group.ranks
    if tensor._group.is_outside:
        return None
    if mesh is not None:
        return _search_layout_on(ownership, tuple(tensor.shape), ranks, mesh)
    known = tensor._cached_layout
    if known is None or known[0] is not ownership:
        spec = tensor._sharding_spec
        dim = spec.dim % len(tensor.shape) if isinstance(spec, ChunkShardingSpec) else None
        layout = _search_layout(ownership, tuple(tensor.shape), ranks, tensor.device.type, dim)
        tensor._cached_layout = known = ownership, layout
    return known[1]


@lru_cache(maxsize=1024)
def _search_layout(
    ownership: ShardOwnership,
    size: tuple[int, ...],
    ranks: tuple[int, ...],
    device: str,
    cut_dim: int | None,
) -> Layout | None:
    """Return the layout that shards form on any mesh: chunks of one dim, or a grid of several.

    Arguments:
        cut_dim: the only dim to try, if it is known.
    """
    boxes = _box_of_each_rank(ownership, ranks)
    if boxes is None:
        return None
    order = {**dict.fromkeys(ranks, 0), **{rank: at for at, rank in enumerate(ownership.owners)}}
    for dim in range(len(size)) if cut_dim is None else [cut_dim]:
        # Empty chunks come last, in the order of the shards.
        ordered = sorted(
            ranks, key=lambda rank: (boxes[rank].is_empty, boxes[rank].start[dim], order[rank])
        )
        layout = _layout_if_matching(DeviceMesh(device, ordered), [dim], size, boxes)
        if layout is not None:
            return layout
    return _grid_layout(size, ranks, device, boxes)


@lru_cache(maxsize=1024)
def _search_layout_on(
    ownership: ShardOwnership, size: tuple[int, ...], ranks: tuple[int, ...], mesh: DeviceMesh
) -> Layout | None:
    """Return the layout that shards form on this mesh."""
    boxes = _box_of_each_rank(ownership, ranks)
    if boxes is None or set(mesh.mesh.flatten().tolist()) != set(ranks):
        return None
    for dims in product(range(len(size)), repeat=mesh.ndim):
        layout = _layout_if_matching(mesh, dims, size, boxes)
        if layout is not None:
            return layout
    return None


def _grid_layout(
    size: tuple[int, ...], ranks: tuple[int, ...], device: str, boxes: dict[int, Box]
) -> Layout | None:
    """Return the layout of shards that cut several dims at once: a mesh axis for each dim."""
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
    return _layout_if_matching(DeviceMesh(device, places), dims, size, boxes)


def _layout_if_matching(
    mesh: DeviceMesh, dims: Sequence[int], size: tuple[int, ...], boxes: dict[int, Box]
) -> Layout | None:
    """Return the layout that splits these dims over the axes, if it gives every rank its box."""
    layout = Layout.from_placements(mesh, size, [Shard(dim) for dim in dims])
    for rank, box in boxes.items():
        place = mesh.coordinate_of(rank)
        assert place is not None, "all ranks are on the mesh"
        expected = layout.box(place)
        if expected != box and not (expected.is_empty and box.is_empty):
            return None
    return layout


def _box_of_each_rank(ownership: ShardOwnership, ranks: tuple[int, ...]) -> dict[int, Box] | None:
    """Return the one box that each rank's shards make up together; None if they do not."""
    if not ownership.boxes[0].start:
        return None if len(ranks) > 1 else {ranks[0]: ownership.boxes[0]}
    found = {}
    for rank in ranks:
        own = ownership.boxes_of(rank)
        some = [box for box in own if not box.is_empty] or own[:1] or [ownership.empty_box]
        starts = zip(*(box.start for box in some), strict=True)
        stops = zip(*(box.stop for box in some), strict=True)
        box = Box(tuple(map(min, starts)), tuple(map(max, stops)))
        if math.prod(box.shape) != sum(math.prod(each.shape) for each in some):
            return None
        found[rank] = box
    return found


def suggest_reshard(tensor: ShardedTensorCore, mesh: DeviceMesh | None = None) -> str:
    """Return the part of a message that says how to reshard, so that the shards form a layout."""
    if not tensor.shape:
        return "x.full_tensor() is its one element, on every rank"
    dim = max(range(len(tensor.shape)), key=lambda dim: tensor.shape[dim])
    ranks = tensor._group.ranks if mesh is None else mesh.mesh.flatten().tolist()
    placements = [f"rank:{rank}/{tensor.device.type}" for rank in ranks]
    return f"x.reshard(ChunkShardingSpec({dim}, {placements})) makes them so"


# ---- from a layout to shards


def from_dtensor(cls: type[_Core], tensor: DTensor, process_group: GroupLike = None) -> _Core:
    """Make a sharded tensor of class `cls` that shares the memory of a DTensor."""
    if not isinstance(tensor, DTensor):
        raise ShardedTensorError(f"tensor: expected a DTensor, got {type(tensor).__name__}")
    layout = tensor.mesh_layout
    mesh = layout.mesh
    group = as_rank_group(mesh if process_group is None else process_group)
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
    spec, shards, ownership, found = _describe_layout(layout, group.ranks)
    properties = TensorProperties(dtype=local.dtype, requires_grad=local.requires_grad)
    # Copies, because the described shards are cached and users may write to metadata.
    own = [each.copy() for each in shards]
    metadata = ShardedTensorMetadata(own, layout.size, properties)
    pieces = [local[box.slices] for _, box in layout.boxes()] if layout.is_cut else [local]
    result = cls._from_parts(metadata, spec, pieces, group, ownership)
    result._cached_layout = ownership, found
    return result


@lru_cache(maxsize=1024)
def _describe_layout(
    layout: Layout, ranks: tuple[int, ...]
) -> tuple[ShardingSpec, list[ShardMetadata], ShardOwnership, Layout | None]:
    """Return the spec, the shards and the ownership of a layout, and the layout that `find_layout`
    finds for them."""
    spec = _spec_of(layout)
    shards = spec.build_metadata(layout.shape, TensorProperties()).shards_metadata
    owners = [each.placement.rank() for each in shards if each.placement is not None]
    ownership = ShardOwnership(
        tuple(each.box for each in shards), tuple(rank for rank in owners if rank is not None)
    )
    found = _search_layout(ownership, layout.shape, ranks, layout.mesh.device_type, None)
    if found is None and not layout.partial:
        found = layout  # the search misses uneven splits by several axes, and cut dims
    return spec, shards, ownership, found


def _spec_of(layout: Layout) -> ShardingSpec:
    """Return the spec that cuts a tensor as a layout does."""
    mesh = layout.mesh
    ranks = mesh.mesh.flatten().tolist()
    if len(layout.placements) == 1 and layout.placements[0].is_shard() and not layout.is_cut:
        (split,) = layout.placements
        assert isinstance(split, Shard), "it is_shard()"
        return ChunkShardingSpec(split.dim, [f"rank:{rank}/{mesh.device_type}" for rank in ranks])
    shards = []
    for rank in ranks:
        boxes = [box for box, _ in layout.boxes(mesh.coordinate_of(rank))]
        shards += [ShardMetadata.of_box(box, f"rank:{rank}/{mesh.device_type}") for box in boxes]
    return EnumerableShardingSpec(shards)
