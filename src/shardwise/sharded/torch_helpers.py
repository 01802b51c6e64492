"""Torch's helper functions around sharded tensors, for programs that call them by name.

They describe shards that a program gathers itself, and move the shard of a rank by hand.
`ShardedTensor` does all of this by itself; nothing here is needed to use one. The names are those
of torch.distributed._shard, without the underscore that some of them begin with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import accumulate

import torch

from shardwise.core.errors import ShardedTensorError
from shardwise.sharded.group import GroupLike, ShardOwnership, as_rank_group, in_rank_order
from shardwise.sharded.metadata import (
    Shard,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    check_tiling,
)
from shardwise.sharded.specs import (
    ChunkShardingSpec,
    ShardingSpec,
    build_checked_metadata,
    get_chunked_dim_size,
    get_split_size,
    infer_spec,
)
from shardwise.sharded.transfer import ShardMove, move_shards
from shardwise.torch_internals import RemoteDevice

# ---- metadata


def parse_and_validate_remote_device(
    pg: GroupLike, remote_device: RemoteDevice | None
) -> tuple[int | None, torch.device]:
    """Return the global rank that a placement names, None if it names none, and the device there.

    A rank that is not in the process group is refused, unless the caller is not in it either.
    """
    if remote_device is None:
        raise ShardedTensorError("remote_device: expected a placement 'rank:N/device', got None")
    group = as_rank_group(pg)
    is_named = remote_device.rank() is not None or remote_device.worker_name() is not None
    rank = group.owner(remote_device, "remote_device") if is_named else None
    return rank, remote_device.device()


def build_metadata_from_local_shards(
    local_shards: Sequence[Shard], global_size: torch.Size, current_rank: int, pg: GroupLike
) -> ShardedTensorMetadata:
    """Return the metadata of one rank's shards, for `build_global_metadata`.

    Arguments:
        local_shards: at least one; all on the current rank, with the same properties.
        current_rank: the global rank of the caller.
    """
    if not local_shards:
        raise ShardedTensorError("local_shards: expected at least one, got none")
    first = TensorProperties.common_to(local_shards[0].tensor)
    for at, shard in enumerate(local_shards):
        rank, _ = parse_and_validate_remote_device(pg, shard.metadata.placement)
        if rank != current_rank:
            raise ShardedTensorError(
                f"local_shards[{at}].metadata.placement: expected rank {current_rank}, the current "
                f"one; got {shard.metadata.placement}"
            )
        shard.check()
        _check_same(first, TensorProperties.common_to(shard.tensor), f"local_shards[{at}]")
    if first.layout != torch.strided:
        raise ShardedTensorError(
            f"local_shards: expected tensors with layout torch.strided, got {first.layout}"
        )
    shards = [each.metadata for each in local_shards]
    return ShardedTensorMetadata(shards, torch.Size(global_size), first)


def build_global_metadata(
    gathered_metadatas: Sequence[ShardedTensorMetadata | None], recalc_metadata: bool = False
) -> ShardedTensorMetadata:
    """Join the metadata of all ranks to that of the whole tensor, and check that shards tile it.

    Arguments:
        gathered_metadatas: one entry for each rank; None for a rank without shards.
        recalc_metadata: compute offsets and the global size anew: the shards are stacked along
            dim 0 in the order of the ranks.
    """
    found = [(rank, each) for rank, each in enumerate(gathered_metadatas) if each is not None]
    if not found:
        raise ShardedTensorError("gathered_metadatas: expected shards on some rank, got none")
    _, first = found[0]
    for rank, each in found:
        if each.size != first.size:
            raise ShardedTensorError(
                f"gathered_metadatas[{rank}].size: expected {tuple(first.size)}, as rank "
                f"{found[0][0]} has; got {tuple(each.size)}"
            )
        _check_same(first.tensor_properties, each.tensor_properties, f"gathered_metadatas[{rank}]")
    shards = [shard.copy() for _, each in found for shard in each.shards_metadata]
    whole = ShardedTensorMetadata(shards, first.size, replace(first.tensor_properties))
    if recalc_metadata:
        recalc_global_sharded_tensor_metadata(whole, 0)
    check_tiling(whole.shards_metadata, whole.size)
    return whole


def recalc_global_sharded_tensor_metadata(
    global_sharded_tensor_metadata: ShardedTensorMetadata, sharded_dim: int
) -> None:
    """Set offsets and the global size of metadata: shards are stacked along a dim, by rank."""
    shards = global_sharded_tensor_metadata.shards_metadata
    if not shards or any(each.placement is None for each in shards):
        raise ShardedTensorError(f"shards_metadata: expected shards with placements, got {shards}")
    ordered = sorted(shards, key=lambda each: each.placement.rank())  # type: ignore[union-attr, return-value, arg-type]
    ends = list(accumulate(each.shard_sizes[sharded_dim] for each in ordered))
    for each, end in zip(ordered, ends, strict=True):
        each.shard_offsets = [0] * len(each.shard_sizes)
        each.shard_offsets[sharded_dim] = end - each.shard_sizes[sharded_dim]
    size = list(ordered[0].shard_sizes)
    size[sharded_dim] = ends[-1]
    global_sharded_tensor_metadata.size = torch.Size(size)


def infer_sharding_spec_from_shards_metadata(
    shards_metadata: Sequence[ShardMetadata],
) -> ShardingSpec:
    """Return the spec of shards that make up a tensor: chunks of one dim, or the list of shards."""
    if not shards_metadata:
        raise ShardedTensorError("shards_metadata: expected at least one shard, got none")
    stops = zip(*(each.box.stop for each in shards_metadata), strict=True)
    return infer_spec(shards_metadata, [max(each) for each in stops])


def check_tensor(shards_metadata: Sequence[ShardMetadata], tensor_dims: Sequence[int]) -> None:
    """Refuse shards that overlap, reach beyond a tensor of this size, or leave some of it out."""
    check_tiling(shards_metadata, tensor_dims)


def check_shard_metadata_pair_overlap(shard1: ShardMetadata, shard2: ShardMetadata) -> bool:
    """Tell whether two shards have an element in common."""
    return not shard1.box.intersect(shard2.box).is_empty


def get_chunk_sharding_params(
    sharding_dim_size: int, world_size: int, spec: ChunkShardingSpec, rank: int
) -> tuple[int, int]:
    """Return the first index and the length of a rank's chunk of a dim."""
    split_size = get_split_size(sharding_dim_size, world_size)
    at = get_idx_from_placements(spec.placements, rank)
    length = get_chunked_dim_size(sharding_dim_size, split_size, at)
    return min(split_size * at, sharding_dim_size), length


def get_idx_from_placements(placements: Sequence[RemoteDevice], current_rank: int) -> int:
    """Return the position of the first placement that names a rank."""
    for at, placement in enumerate(placements):
        if placement.rank() == current_rank:
            return at
    raise ShardedTensorError(
        f"current_rank: expected a rank of the placements {[str(each) for each in placements]}, "
        f"got {current_rank}"
    )


def _check_same(first: TensorProperties, other: TensorProperties, argument: str) -> None:
    for name in (each.name for each in fields(TensorProperties) if each.name != "strides"):
        wanted, got = getattr(first, name), getattr(other, name)
        if wanted != got:
            raise ShardedTensorError(
                f"{argument}: expected {name} {wanted}, as the first one has; got {got}"
            )


# ---- moves of one rank's shard


def build_reshard_metadata(
    st_size: torch.Size, sharding_spec: ShardingSpec, world_size: int
) -> tuple[list[ShardMetadata], list[int]]:
    """Return the shards of a spec in the order of the ranks, and the ranks in that of the spec."""
    shards = build_checked_metadata(sharding_spec, st_size, TensorProperties()).shards_metadata
    ranks = [each.placement.rank() for each in shards if each.placement is not None]
    if len(ranks) != world_size or None in ranks:
        raise ShardedTensorError(
            f"sharding_spec: expected {world_size} placements 'rank:N/device', one for each rank; "
            f"got {sharding_spec}"
        )
    return sorted(shards, key=lambda each: each.placement.rank()), ranks  # type: ignore[union-attr, return-value, arg-type]


def reshard_local_shard(
    local_tensor: torch.Tensor,
    st_size: torch.Size,
    sharding_spec: ShardingSpec,
    resharding_spec: ShardingSpec,
    pg: GroupLike,
) -> tuple[list[Shard], list[ShardMetadata]]:
    """Move this rank's shard of a tensor from one spec to another; all ranks of the group call it.

    Backward: the gradients move back.

    Arguments:
        local_tensor: the only shard that `sharding_spec` gives to this rank.

    Returns:
        This rank's shards afterwards, and the metadata of all shards in the order of the ranks.
    """
    group = as_rank_group(pg)
    properties = TensorProperties.common_to(local_tensor)
    old = build_checked_metadata(sharding_spec, st_size, properties)
    before = ShardOwnership.of(old.shards_metadata, group)
    shapes = [box.shape for box in before.boxes_of(group.rank)]
    if shapes != [tuple(local_tensor.shape)]:
        raise ShardedTensorError(
            f"local_tensor: expected this rank's only shard; the spec gives it shards of shapes "
            f"{shapes}, got a tensor of shape {tuple(local_tensor.shape)}"
        )
    new = build_checked_metadata(resharding_spec, st_size, properties)
    metadata, after = in_rank_order(new, ShardOwnership.of(new.shards_metadata, group))
    move = ShardMove(group, before, after, "reshard_local_shard")
    like = local_tensor.detach().reshape(-1)[:0]
    is_recorded = torch.is_grad_enabled() and local_tensor.requires_grad
    if is_recorded:
        move.check_gradients_return("resharding_spec")
    placeholder = like.clone().requires_grad_() if is_recorded else None
    tensors = move_shards(move, [local_tensor], like, placeholder)
    own = [
        each
        for each, owner in zip(metadata.shards_metadata, after.owners, strict=True)
        if owner == group.rank
    ]
    return list(map(Shard, tensors, own)), metadata.shards_metadata


def reshuffle_local_shard(
    local_shard: torch.Tensor,
    st_size: torch.Size,
    sharding_spec: ShardingSpec,
    resharding_spec: ShardingSpec,
    pg: GroupLike,
) -> tuple[list[Shard], list[ShardMetadata]]:
    """Do what `reshard_local_shard` does; torch's name for specs that cut the same dim."""
    return reshard_local_shard(local_shard, st_size, sharding_spec, resharding_spec, pg)
