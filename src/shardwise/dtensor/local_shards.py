"""Checks that the local tensors of all ranks fit together, and the global shape they form."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from shardwise.comm import agreement, communicator
from shardwise.core import world
from shardwise.core.errors import LayoutError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement, Shard, as_placement
from shardwise.dtensor.state import Policy
from shardwise.torch_internals import functional_collectives

_MOST_DIMS = 32


class _Setting(threading.local):
    """The policy of one thread; simulated ranks are threads."""

    piece_sizes = "ask"


_setting = _Setting()


def piece_sizes(policy: str) -> Policy:
    """Set, on this thread, how ranks find the global size of a split dim from their shards.

    `DTensor.from_local` without `shape` needs that size. So do styles whose plain inputs are split
    along a dim whose size the module does not know, such as a sequence.

    Arguments:
        policy: `"ask"` makes the ranks exchange their sizes, in one small collective each time
            (the default); `"even"` assumes shards of equal size, as torch does: no communication,
            but uneven shards give wrong shapes, or a deadlock.

    Example:
        >>> with sw.piece_sizes("even"):
        ...     model(x)
    """
    return Policy(_setting, "piece_sizes", policy, ("ask", "even"))


def guess_layout(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None = None,
) -> Layout:
    """Return the layout of shards without asking other ranks.

    If the global shape is not given, all shards are taken to be like this one.
    """
    if shape is not None:
        return Layout.from_placements(mesh, shape, placements)
    placements = [as_placement(each, f"placements[{i}]") for i, each in enumerate(placements)]
    ordinary = [Shard(each.dim) if isinstance(each, Shard) else each for each in placements]
    probe = Layout.from_placements(mesh, local.shape, ordinary)
    shape = [
        size * math.prod(mesh.shape[axis] for axis in axes)
        for size, axes in zip(probe.shape, probe.shard_order, strict=True)
    ]
    return Layout.from_placements(mesh, shape, placements)


def infer_layout(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Layout:
    """Return the layout of shards whose global shape was not given.

    The ranks exchange their sizes, unless `piece_sizes("even")` is set; all of them call this.
    """
    placements = [as_placement(each, f"placements[{i}]") for i, each in enumerate(placements)]
    ordinary = [Shard(each.dim) if isinstance(each, Shard) else each for each in placements]
    probe = Layout.from_placements(mesh, local.shape, ordinary)
    if not any(probe.shard_order) or mesh.is_abstract or _setting.piece_sizes == "even":
        return guess_layout(local, mesh, placements)
    sizes = _all_sizes(local, mesh)
    shape = []
    for dim, axes in enumerate(probe.shard_order):
        first = [0] * mesh.ndim
        total = 0
        for number in range(math.prod(mesh.shape[axis] for axis in axes)):
            for axis in reversed(axes):
                number, first[axis] = divmod(number, mesh.shape[axis])
            total += sizes[tuple(first)][dim]
        shape.append(total if axes else sizes[tuple(first)][dim])
    layout = Layout.from_placements(mesh, shape, placements)
    for place, found in sizes.items():
        if found != layout.local_shape(place):
            raise LayoutError(
                f"local_tensor: the pieces are no legal sharding {tuple(placements)} of one "
                f"tensor: rank {mesh.rank_at(place)} has {found}, and would have "
                f"{layout.local_shape(place)} of {layout!r}, as torch.chunk cuts it; "
                "redistribute the rows, or gather them and use distribute_tensor"
            )
    return layout


def _all_sizes(local: torch.Tensor, mesh: DeviceMesh) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Gather the shape of every rank's shard, by the rank's coordinate on the mesh."""
    if local.dim() > _MOST_DIMS:
        raise LayoutError(f"local_tensor: expected at most {_MOST_DIMS} dims, got {local.dim()}")
    device = local.device
    if local.is_meta:  # it has no data to send, but its sizes are known
        device = torch.device("cpu" if mesh.device_type == "meta" else mesh.device_type)
    mine = torch.full((1, 1 + _MOST_DIMS), -1, dtype=torch.int64, device=device)
    mine[0, : 1 + local.dim()] = torch.tensor([local.dim(), *local.shape])
    rows = communicator(mesh).all_gather(mine).tolist()
    ranks = mesh.mesh.flatten().tolist()
    found = {}
    for rank, (ndim, *sizes) in zip(ranks, rows, strict=True):
        place = mesh.coordinate_of(rank)
        assert place is not None, "it is of the mesh"
        found[place] = tuple(sizes[:ndim])
        if ndim != local.dim():
            raise LayoutError(
                f"local_tensor: expected pieces of as many dims on every rank; this one has "
                f"{tuple(local.shape)}, rank {rank} has {found[place]}"
            )
    return found


def global_stride(local: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Return the strides of the global tensor if it were stored as a shard with these strides."""
    shape = layout.shape
    if layout.is_replicated:
        return tuple(local)
    sizes = layout.local_shape()
    if 0 in sizes:
        return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))

    def place(dim: int) -> tuple[int, bool, int]:
        # Of two dims with the same stride, one has size 1 here, and is the inner one.
        return local[dim], sizes[dim] > 1, -dim

    result = []
    for dim, stride in enumerate(local):
        inner = [other for other in range(len(local)) if local[other] and place(other) < place(dim)]
        grown = stride * math.prod(shape[other] for other in inner)
        result.append(grown // math.prod(sizes[other] for other in inner))
    return tuple(result)


def shard_stride(layout: Layout, strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides of this rank's shard of a dense global tensor with these strides.

    The dims of the shard lie in memory in the same order. None for strides that overlap or leave
    gaps.
    """
    shape, sizes = layout.shape, layout.local_shape()
    inner_first = sorted(range(len(shape)), key=lambda dim: (strides[dim], shape[dim] > 1, -dim))
    expected, step = 1, 1
    result = [1] * len(shape)
    for dim in inner_first:
        if shape[dim] > 1 and strides[dim] != expected:
            return None
        result[dim] = step
        expected *= max(shape[dim], 1)
        step *= max(sizes[dim], 1)
    return tuple(result)


def has_short_dims(layout: Layout) -> bool:
    """Return whether a dim has one index in this rank's shard, and more in the global tensor.

    Torch ignores the stride of a dim of size 1. So what holds for the memory of such a shard, that
    it is contiguous or can be viewed in another shape, may not hold for those of other ranks.
    """
    return any(
        here == 1 < size for here, size in zip(layout.local_shape(), layout.shape, strict=True)
    )


def is_globally_contiguous(
    local: torch.Tensor,
    layout: Layout,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> bool:
    """Return whether the global tensor would be contiguous if it were stored as a shard is."""
    shape, strides = layout.shape, global_stride(local.stride(), layout)
    dims = list(range(len(shape)))
    if memory_format in (torch.channels_last, torch.channels_last_3d):
        dims = [0, *dims[2:], 1]
    expected = 1
    for dim in reversed(dims):
        if shape[dim] != 1:
            if strides[dim] != expected:
                return False
            expected *= shape[dim]
    return True


def is_globally_viewable(local: torch.Tensor, layout: Layout, target: Sequence[int]) -> bool:
    """Return whether the global tensor could be viewed in a shape if it were stored as a shard
    is."""
    if 0 in target:
        return True
    # Dims that lie one in the other in memory form a block, which can be divided otherwise.
    blocks: list[tuple[int, int]] = []
    for size, stride in zip(layout.shape, global_stride(local.stride(), layout), strict=True):
        if size == 1:
            continue
        if blocks and blocks[-1][1] == stride * size:
            size *= blocks.pop()[0]
        blocks.append((size, stride))
    rest = 1
    for size in reversed([size for size in target if size != 1]):
        rest = blocks.pop()[0] if rest == 1 and blocks else rest
        if rest % size:
            return False
        rest //= size
    return True


def is_under_way(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is the result of a functional collective of torch that nobody has
    waited for yet: a wrapper without memory."""
    return type(tensor).__name__ == "AsyncCollectiveTensor"


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """Return the result of a functional collective once it is there; other tensors as they are."""
    if is_under_way(tensor):
        return functional_collectives.wait_tensor(tensor)  # type: ignore[no-any-return]
    return tensor


def check_class(argument: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor of a class with operators of its own, such as a quantized tensor.

    A DTensor is the local tensor itself with another class, so it cannot have both classes.
    """
    kind = type(tensor)
    if kind.__torch_dispatch__ is not _NO_DISPATCH:
        raise LayoutError(
            f"{argument}: expected a plain tensor, got {kind.__name__}, which has operators of its "
            "own (__torch_dispatch__): a DTensor is the local tensor itself, and cannot be a "
            f"{kind.__name__} as well. Take its plain value, such as x.dequantize() or x.wait(), "
            "or the tensors that it consists of"
        )


_NO_DISPATCH = torch.Tensor.__torch_dispatch__


def check_supported(argument: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that cannot be a shard: a sparse or nested one, one without a shape, or one
    of a class with operators of its own."""
    check_class(argument, tensor)
    if is_lazy(tensor):
        raise LayoutError(
            f"{argument}: expected a tensor with a shape, got {type(tensor).__name__}; materialize "
            "it first, as the first forward of its module does"
        )
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"one with layout {tensor.layout}"
        raise LayoutError(f"{argument}: expected a dense tensor, got {kind}; to_dense() it first")


def check_shard(local: torch.Tensor, layout: Layout) -> None:
    """Refuse a local tensor that does not have the shape of this rank's shard."""
    place = layout.mesh.get_coordinate()
    if layout.mesh.is_abstract or place is None:
        return
    expected = layout.local_shape(place)
    if tuple(local.shape) != expected:
        raise LayoutError(
            f"local_tensor: expected {expected}, the piece at {place} of {layout!r}; "
            f"got {tuple(local.shape)}"
        )


def check_pickled(local: torch.Tensor, layout: Layout, place: tuple[int, ...] | None) -> None:
    """Refuse a shard that was pickled elsewhere and that this rank does not have.

    A process without other ranks, such as one that collects the results of `launch`, may have any
    shard: an operator that needs the other shards fails there.

    Arguments:
        place: the coordinate of the rank that pickled it; None for a rank outside of the mesh.
    """
    mesh = layout.mesh
    if mesh.is_abstract or layout.is_whole:
        return
    size = world.current().size
    if int(mesh.mesh.max()) >= size:
        if size == 1:
            return
        found = f"this process is rank {mesh.get_rank()} of {size}"
    else:
        own = mesh.get_coordinate()
        is_replica = own is not None and place is not None and not layout.partial
        if own == place or (is_replica and layout.boxes(own) == layout.boxes(place)):
            return check_shard(local, layout)
        found = f"this rank is at {own}"
    raise LayoutError(
        f"pickle: expected to be the rank at {place} of {layout!r} on {mesh!r}, whose piece this "
        f"is; {found}. A rank loads what it has saved itself, on the same mesh. Save "
        "x.full_tensor() or a state dict of torch's get_model_state_dict with full_state_dict=True "
        "to load it elsewhere, or use torch.distributed.checkpoint, which loads into any layout"
    )


def state_layout(layout: Layout) -> None:
    """State the layout of a tensor that was made without communication: the next collectives of
    these ranks compare what each says."""
    mesh = layout.mesh
    if mesh.is_abstract or not agreement.is_due(layout, mesh) or mesh.get_coordinate() is None:
        return
    groups = [mesh.ranks_along([axis]) for axis in range(mesh.ndim)]
    agreement.state(f"DTensor.from_local({layout!r})", groups)


def check_replicas(local: torch.Tensor, layout: Layout) -> None:
    """Refuse shards that should be replicas and differ; collective over the mesh."""
    mesh = layout.mesh
    mine = (tuple(layout.shape), str(local.dtype), local.requires_grad, local.is_meta)
    facts = communicator(mesh).gather_objects(mine)
    ranks = mesh.mesh.flatten().tolist()
    for rank, theirs in zip(ranks, facts, strict=True):
        if theirs != facts[0]:
            raise LayoutError(
                f"local_tensor: expected the same shape, dtype, requires_grad and is_meta on every "
                f"rank; rank {ranks[0]} has {facts[0]}, rank {rank} has {theirs}"
            )
    whole = [axis for axis, each in enumerate(layout.placements) if each.is_replicate()]
    if not whole or layout.numel == 0 or local.is_meta:
        return  # decided by the layout: a rank whose own shard is empty takes part
    group = communicator(mesh, whole)
    first = group.broadcast(local.detach().contiguous(), 0)
    same = bool(((first == local) | ((first != first) & (local != local))).all())
    verdicts = communicator(mesh).gather_objects(same)
    wrong = [rank for rank, good in zip(ranks, verdicts, strict=True) if not good]
    if wrong:
        raise LayoutError(
            f"local_tensor: called Replicate over {', '.join(map(mesh.axis_name, whole))}, "
            f"but the values on ranks {wrong} differ from the first rank's"
        )


def differing_ranks(mesh: DeviceMesh, content: Any) -> tuple[list[int], list[int]]:
    """Return the ranks whose bytes differ from those of the majority, and all other ranks.

    The ranks compare digests: an all_gather of 8 bytes per rank. All ranks of the mesh call it.

    Arguments:
        content: this rank's bytes, or an object with a buffer of them.
    """
    ranks = mesh.mesh.flatten().tolist()
    if mesh.size() == 1 or mesh.is_abstract or mesh.device_type == "meta":
        return [], ranks
    digest = blake2b(content, digest_size=8).digest()
    mine = torch.tensor([int.from_bytes(digest, "little", signed=True)], device=mesh.device_type)
    digests = communicator(mesh).all_gather(mine).tolist()
    common, _ = Counter(digests).most_common(1)[0]
    others = [rank for rank, each in zip(ranks, digests, strict=True) if each != common]
    return others, [rank for rank in ranks if rank not in others]
