"""Between explicit shards and layouts: which shards are a layout, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from operator import add
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from shardwise.box import Box
from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh, as_mesh
from shardwise.placement import Shard as SplitAlong
from shardwise.sharded import building
from shardwise.sharded.errors import ShardedTensorError
from shardwise.sharded.group import GroupLike, as_group
from shardwise.sharded.held import Held
from shardwise.sharded.metadata import (
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from shardwise.sharded.specs import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec
from shardwise.tensor import DTensor, unwrap, wrap

if TYPE_CHECKING:
    from shardwise.sharded.tensor import ShardedTensor


# ---- from shards to a layout


def to_dtensor(tensor: ShardedTensor, device_mesh: DeviceMesh | None = None) -> DTensor:
    """The same tensor as a DTensor; it shares memory if no rank holds several shards."""
    layout = layout_of(tensor, None if device_mesh is None else as_mesh(device_mesh))
    if layout is None:
        where = "" if device_mesh is None else f" on {device_mesh!r}"
        raise ShardedTensorError(
            f"to_dtensor: these shards are no layout of a DTensor{where}: each rank's must make up "
            "one box, and the boxes chunks of dims, as torch.chunk cuts them; "
            f"{suggested(tensor)}"
        )
    return as_dtensor(tensor, layout)


def as_dtensor(tensor: ShardedTensor, layout: Layout) -> DTensor:
    """The DTensor of this layout, which the shards are."""
    local = _as_one(tensor, layout)
    return wrap(local.view_as(local), layout)


def _as_one(tensor: ShardedTensor, layout: Layout) -> torch.Tensor:
    """This rank's shards as the one piece that a layout gives it."""
    shards = tensor._local_shards
    shape = _piece(layout, tensor._group.rank).shape
    if is_shared(tensor):
        if not shards:
            return tensor._empty(shape)
        local = shards[0].tensor
        return local if local.shape == shape else local.reshape(shape)
    if not shards:
        return tensor._empty(shape).clone()
    whole = tensor._like().new_zeros(shape)
    for place, shard in zip(_places(tensor, layout), shards, strict=True):
        # One of no elements is a part of the graph too: it gets a gradient when the others do.
        target = (
            whole.view(-1)[:0].view(shard.tensor.shape) if place is None else whole[place.slices]
        )
        target.copy_(shard.tensor)
    return whole


def is_shared(tensor: ShardedTensor) -> bool:
    """Whether the pieces of a layout are the shards' own memory: on all ranks, or on none."""
    owners = tensor._held.owners
    return len(set(owners)) == len(owners)


def with_piece(model: ShardedTensor, layout: Layout, local: torch.Tensor) -> ShardedTensor:
    """A sharded tensor with the shards of a model whose layout this is.

    Arguments:
        local: the piece that the layout gives this rank.
    """
    shards = model._local_shards
    if len(shards) == 1:
        own = shards[0].tensor.shape
        pieces = [local if local.shape == own else local.reshape(own)]
    else:
        pieces = _parts(model, layout, local)
    made = model._with_results(pieces or [local])
    made._known_layout = model._known_layout
    return made


def write_back(tensor: ShardedTensor, layout: Layout, local: torch.Tensor) -> None:
    """Write this rank's piece, in which several shards were copied together, to the shards."""
    if not tensor._local_shards:  # it refuses what the others refuse
        tensor._empty(tuple(local.shape)).copy_(local)
    for target, part in zip(tensor._tensors(), _parts(tensor, layout, local), strict=True):
        target.copy_(part)


def _parts(tensor: ShardedTensor, layout: Layout, local: torch.Tensor) -> list[torch.Tensor]:
    """Of the piece that a layout gives this rank, what is in each of its shards."""
    places = zip(_places(tensor, layout), tensor._held.by(tensor._group.rank), strict=True)
    return [
        local.reshape(-1)[:0].view(box.shape) if place is None else local[place.slices]
        for place, box in places
    ]


class _Piece(NamedTuple):
    """What a layout gives to a rank."""

    shape: tuple[int, ...]
    boxes: list[tuple[Box, Box]]
    """Each box of indices of the whole tensor, and where it lies in the piece."""


@lru_cache(maxsize=1024)
def _piece(layout: Layout, rank: int) -> _Piece:
    place = layout.mesh.coordinate_of(rank)
    return _Piece(layout.local_shape(place), layout.boxes(place))


def _places(tensor: ShardedTensor, layout: Layout) -> list[Box | None]:
    """Where each of this rank's shards lies in its piece; None for one that is empty."""
    rank = tensor._group.rank
    boxes = _piece(layout, rank).boxes
    return [None if box.is_empty else _place(box, boxes) for box in tensor._held.by(rank)]


def _place(box: Box, boxes: list[tuple[Box, Box]]) -> Box:
    there, here = next(each for each in boxes if each[0].intersect(box) == box)
    inner = box.within(there)
    start = tuple(map(add, here.start, inner.start))
    return Box(start, tuple(map(add, start, inner.shape)))


def layout_of(tensor: ShardedTensor, mesh: DeviceMesh | None = None) -> Layout | None:
    """The layout that the shards are, on this mesh or any; None if they are none."""
    held, ranks = tensor._held, tensor._group.ranks
    if mesh is not None:
        return _found_on(held, tuple(tensor.shape), ranks, mesh)
    known = tensor._known_layout
    if known is None or known[0] is not held:
        spec = tensor._sharding_spec
        dim = spec.dim % len(tensor.shape) if isinstance(spec, ChunkShardingSpec) else None
        layout = _found(held, tuple(tensor.shape), ranks, tensor.device.type, dim)
        tensor._known_layout = known = held, layout
    return known[1]


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
        some = [box for box in own if not box.is_empty] or own[:1] or [held.nowhere]
        starts = zip(*(box.start for box in some), strict=True)
        stops = zip(*(box.stop for box in some), strict=True)
        box = Box(tuple(map(min, starts)), tuple(map(max, stops)))
        if math.prod(box.shape) != sum(math.prod(each.shape) for each in some):
            return None
        found[rank] = box
    return found


def suggested(tensor: ShardedTensor, mesh: DeviceMesh | None = None) -> str:
    """What makes the shards a layout, on this mesh or any, in words."""
    if not tensor.shape:
        return "x.full_tensor() is its one element, on every rank"
    dim = max(range(len(tensor.shape)), key=lambda dim: tensor.shape[dim])
    ranks = tensor._group.ranks if mesh is None else mesh.mesh.flatten().tolist()
    placements = [f"rank:{rank}/{tensor.device.type}" for rank in ranks]
    return f"x.reshard(ChunkShardingSpec({dim}, {placements})) makes them so"


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
    spec, shards, held, found = _described(layout, group.ranks)
    properties = TensorProperties(dtype=local.dtype, requires_grad=local.requires_grad)
    # Of its own: what is described is kept, and users may write to metadata.
    own = [each.copy() for each in shards]
    metadata = ShardedTensorMetadata(own, layout.size, properties)
    pieces = [local[here.slices] for _, here in layout.boxes()] if layout.is_cut else [local]
    made = building.made(metadata, spec, pieces, group, held)
    made._known_layout = held, found
    return made


@lru_cache(maxsize=1024)
def _described(
    layout: Layout, ranks: tuple[int, ...]
) -> tuple[ShardingSpec, list[ShardMetadata], Held, Layout | None]:
    """How the shards of a layout are cut, who holds each, and what layout they are again."""
    spec = _spec(layout)
    shards = spec.build_metadata(layout.shape, TensorProperties()).shards_metadata
    owners = [each.placement.rank() for each in shards if each.placement is not None]
    held = Held(
        tuple(each.box for each in shards), tuple(rank for rank in owners if rank is not None)
    )
    found = _found(held, layout.shape, ranks, layout.mesh.device_type, None)
    if found is None and not layout.partial:
        found = layout  # unevenly split by several axes, or cut in pieces: it is not found again
    return spec, shards, held, found


def _spec(layout: Layout) -> ShardingSpec:
    mesh = layout.mesh
    ranks = mesh.mesh.flatten().tolist()
    if len(layout.placements) == 1 and layout.placements[0].is_shard() and not layout.is_cut:
        (split,) = layout.placements
        assert isinstance(split, SplitAlong), "asked"
        return ChunkShardingSpec(split.dim, [f"rank:{rank}/{mesh.device_type}" for rank in ranks])
    shards = []
    for rank in ranks:
        boxes = [box for box, _ in layout.boxes(mesh.coordinate_of(rank))]
        shards += [ShardMetadata.of_box(box, f"rank:{rank}/{mesh.device_type}") for box in boxes]
    return EnumerableShardingSpec(shards)
