"""Sharded tensors of pieces that the ranks have: checked once, by all ranks together.

What a rank finds wrong with its own shards it tells the others instead of raising: then all ranks
raise the same error, and nobody waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise.sharded import remote
from shardwise.sharded.agreeing import Problem, check_agreement, refuse_problems
from shardwise.sharded.base import bare
from shardwise.sharded.boxes import check_tiling
from shardwise.sharded.errors import ShardedTensorError
from shardwise.sharded.group import Group, GroupLike, as_group
from shardwise.sharded.held import Held, mine
from shardwise.sharded.metadata import (
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from shardwise.sharded.shard import Shard
from shardwise.sharded.specs import (
    ShardingSpec,
    as_size,
    as_spec,
    checked_spec,
    inferred_spec,
    metadata_of,
)

if TYPE_CHECKING:
    from shardwise.sharded.tensor import ShardedTensor


def made(
    metadata: ShardedTensorMetadata,
    spec: ShardingSpec,
    tensors: Sequence[torch.Tensor],
    group: Group,
    held: Held | None = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """A sharded tensor of parts that are known to fit."""
    from shardwise.sharded.tensor import ShardedTensor

    held = Held.of(metadata.shards_metadata, group) if held is None else held
    result = bare(ShardedTensor, spec, metadata, [])
    shards = list(map(Shard, tensors, mine(metadata, held, group)))
    return result._become(group, held, shards, init_rrefs)


# ---- shards that each rank has


@dataclass
class _Brought:
    """What a rank tells the others of its shards."""

    size: tuple[int | None, ...]
    shards: list[ShardMetadata]
    properties: list[TensorProperties]
    """Of each shard's tensor."""
    problem: Problem | None = None


def from_local_shards(
    local_shards: Sequence[Shard],
    *global_size: Any,
    process_group: GroupLike = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """A sharded tensor of the shards that each rank has; all ranks call it.

    What does not fit is refused on all ranks, with the ranks and the property that disagree.

    Arguments:
        local_shards: this rank's; perhaps none.
        global_size: as numbers or one sequence of them. If there are None among them, the shards
            are taken to lie below each other, along dim 0, in the order of the ranks: their
            offsets and the sizes that are None are worked out.
        process_group: the ranks that take part; all by default.
        init_rrefs: as for `ShardedTensor`.
    """
    group = as_group(process_group)
    with remote.together(group, init_rrefs):
        brought = _brought(local_shards, global_size, group)
    everywhere: list[_Brought] = group.communicator.gather_objects(brought)
    refuse_problems(group, [each.problem for each in everywhere])
    check_agreement(group, [{"global_size": each.size} for each in everywhere])
    properties = _agreed_properties(group, everywhere)
    if None in brought.size:
        shards, size = _stacked(group, everywhere)
    else:
        shards = [each for theirs in everywhere for each in theirs.shards]
        size = as_size(brought.size, "global_size")
    check_tiling(shards, size)
    metadata = ShardedTensorMetadata(shards, size, properties)
    tensors = [each.tensor for each in local_shards]
    return made(metadata, inferred_spec(shards, size), tensors, group, init_rrefs=init_rrefs)


def _brought(local_shards: Any, global_size: Any, group: Group) -> _Brought:
    """This rank's shards for the others, with what is wrong about them."""
    sizes = global_size
    if len(sizes) == 1 and isinstance(sizes[0], Sequence):
        (sizes,) = sizes
    told = _Brought((), [], [])
    try:
        as_size([0 if each is None else each for each in sizes], "global_size")
        told.size = tuple(None if each is None else int(each) for each in sizes)
        if not isinstance(local_shards, Sequence):
            raise ShardedTensorError(
                f"local_shards: expected a list of Shards, got {type(local_shards).__name__}"
            )
        for at, shard in enumerate(local_shards):
            if not isinstance(shard, Shard):
                raise ShardedTensorError(
                    f"local_shards[{at}]: expected a Shard, got {type(shard).__name__}"
                )
            owner = group.owner(shard.metadata.placement, f"local_shards[{at}].metadata.placement")
            if owner != group.rank:
                raise ShardedTensorError(
                    f"local_shards[{at}].metadata.placement: expected this rank, {group.rank}; "
                    f"got {shard.metadata.placement}"
                )
            shard.check()
            told.shards.append(shard.metadata)
            told.properties.append(TensorProperties.common_to(shard.tensor))
    except Exception as error:  # whatever it is, nobody waits
        told.problem = Problem.of(error)
    return told


def _agreed_properties(group: Group, everywhere: list[_Brought]) -> TensorProperties:
    """What all shards of all ranks have in common."""
    found = [
        (rank, at, each)
        for rank, theirs in zip(group.ranks, everywhere, strict=True)
        for at, each in enumerate(theirs.properties)
    ]
    if not found:
        raise ShardedTensorError("local_shards: expected a shard on at least one rank, got none")
    rank, at, first = found[0]
    for other, number, theirs in found:
        for name, one, another in _differences(first, theirs):
            raise ShardedTensorError(
                f"local_shards: expected the same {name} for all; shard {at} of rank {rank} has "
                f"{one}, shard {number} of rank {other} has {another}"
            )
    if first.layout != torch.strided:
        raise ShardedTensorError(
            f"local_shards: expected tensors with layout torch.strided, got {first.layout}"
        )
    return first


def _differences(
    one: TensorProperties, other: TensorProperties
) -> Iterator[tuple[str, object, object]]:
    """The names and both values of properties that differ; a tensor has no memory format."""
    for name in ("dtype", "layout", "requires_grad", "pin_memory"):
        pair = getattr(one, name), getattr(other, name)
        if pair[0] != pair[1]:
            yield name, *pair


def _stacked(group: Group, everywhere: list[_Brought]) -> tuple[list[ShardMetadata], torch.Size]:
    """The shards below each other in the order of the ranks, and the size of all."""
    size = everywhere[0].size
    found: list[int] = []
    rows = 0
    shards = []
    for rank, theirs in zip(group.ranks, everywhere, strict=True):
        for each in theirs.shards:
            if len(each.shard_sizes) != len(size):
                raise ShardedTensorError(
                    f"global_size: expected one number per dim, {len(each.shard_sizes)} for "
                    f"{each.shard_sizes} of rank {rank}; got {size}"
                )
            found = found or each.shard_sizes
            if each.shard_sizes[1:] != found[1:]:
                raise ShardedTensorError(
                    f"local_shards: expected the same sizes but for dim 0, as global_size {size} "
                    f"is to be worked out; one is {found}, one of rank {rank} {each.shard_sizes}"
                )
            offsets = [rows, *[0] * (len(size) - 1)]
            shards.append(ShardMetadata(offsets, each.shard_sizes, each.placement))
            rows += each.shard_sizes[0]
    actual = (rows, *found[1:])
    for dim, (given, real) in enumerate(zip(size, actual, strict=True)):
        if given not in (None, real):
            raise ShardedTensorError(
                f"global_size: expected {real} for dim {dim}, as the shards make up {actual}; "
                f"got {size}"
            )
    return shards, torch.Size(actual)


def from_local_tensor(
    local_tensor: torch.Tensor,
    sharding_spec: ShardingSpec,
    *global_size: Any,
    process_group: GroupLike = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """A sharded tensor of which each rank has its one shard; nothing is communicated, but for
    `init_rrefs`.

    Arguments:
        local_tensor: the shard that the spec gives to this rank.
        sharding_spec: how the whole is cut: one shard for each rank.
        global_size: as numbers or one sequence of them.
    """
    group = as_group(process_group)
    with remote.together(group, init_rrefs):
        as_spec(sharding_spec, "sharding_spec")
        if not isinstance(local_tensor, torch.Tensor):
            raise ShardedTensorError(f"local_tensor: expected a tensor, got {local_tensor!r}")
        properties = TensorProperties.common_to(local_tensor)
        metadata = metadata_of(sharding_spec, as_size(global_size, "global_size"), properties)
        checked_spec(metadata, sharding_spec)
        held = Held.of(metadata.shards_metadata, group)
        shards = mine(metadata, held, group)
        if len(shards) != 1:
            raise ShardedTensorError(
                f"sharding_spec: expected one shard for each rank, this one gets {len(shards)}; "
                "use init_from_local_shards"
            )
        _check_against([Shard(local_tensor, shards[0])], metadata, shards)
    return made(metadata, sharding_spec, [local_tensor], group, held, init_rrefs)


def from_local_shards_and_global_metadata(
    local_shards: Sequence[Shard],
    sharded_tensor_metadata: ShardedTensorMetadata,
    process_group: GroupLike = None,
    init_rrefs: bool = False,
    sharding_spec: ShardingSpec | None = None,
) -> ShardedTensor:
    """A sharded tensor of this rank's shards and the metadata of all; nothing is communicated, but
    for `init_rrefs`.

    This rank's shards are checked against the metadata, which must be the same on every rank.

    Arguments:
        local_shards: those of this rank, in the order of the metadata.
        sharded_tensor_metadata: the shards of all ranks.
        sharding_spec: how it is cut; found out by default.
    """
    group = as_group(process_group)
    metadata = sharded_tensor_metadata.copy()  # it is the caller's, and requires_grad_ writes to it
    with remote.together(group, init_rrefs):
        spec = checked_spec(metadata, sharding_spec)
        held = Held.of(metadata.shards_metadata, group)
        _check_against(local_shards, metadata, mine(metadata, held, group))
    tensors = [each.tensor for each in local_shards]
    return made(metadata, spec, tensors, group, held, init_rrefs)


def _check_against(
    local_shards: Sequence[Shard], metadata: ShardedTensorMetadata, expected: list[ShardMetadata]
) -> None:
    """Refuse shards of this rank that are not as metadata says."""
    if len(local_shards) != len(expected):
        raise ShardedTensorError(
            f"local_shards: expected {len(expected)}, as many as the metadata gives to this rank; "
            f"got {len(local_shards)}"
        )
    for at, (shard, wanted) in enumerate(zip(local_shards, expected, strict=True)):
        if shard.metadata != wanted:
            raise ShardedTensorError(
                f"local_shards[{at}].metadata: expected {wanted}, as in the global metadata; "
                f"got {shard.metadata}"
            )
        actual = TensorProperties.common_to(shard.tensor)
        for name, common, own in _differences(metadata.tensor_properties, actual):
            raise ShardedTensorError(
                f"local_shards[{at}].tensor: expected {name} {common}, as in the metadata's "
                f"tensor_properties; got {own}"
            )
