"""Checks that the local tensors of all ranks fit together; the memory of the tensor they form."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from shardwise.comm import agreement, communicator
from shardwise.core import world
from shardwise.core.errors import LayoutError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.torch_internals import functional_collectives


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
    """Tell whether a tensor is the result of a functional collective of torch that is still
    running: a wrapper without memory."""
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
    state_value("DTensor.from_local", layout, layout, layout.mesh)


def state_value(what: str, key: Hashable, value: Any, mesh: DeviceMesh) -> None:
    """State something about a tensor, for the next collectives of these ranks to compare.

    Arguments:
        key: which statements count as one that was compared before.
    """
    if mesh.is_abstract or not agreement.is_due((what, key), mesh) or mesh.get_coordinate() is None:
        return
    groups = [mesh.ranks_along([axis]) for axis in range(mesh.ndim)]
    agreement.state(f"{what}({value!r})", groups)


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
