"""Make sharded tensors: of pieces that the ranks have, of a tensor that one rank has, of one value.

A rank that finds an error in its own arguments sends it to the others instead of raising it. Then
all ranks raise the same error, and none waits in a collective for a rank that has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import init

from shardwise.core.checks import as_int
from shardwise.core.errors import ShardedTensorError
from shardwise.sharded import remote
from shardwise.sharded.group import (
    GroupLike,
    RankGroup,
    RankProblem,
    ShardOwnership,
    as_rank_group,
    check_agreement,
    local_metadata,
    raise_problems,
)
from shardwise.sharded.metadata import (
    Shard,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    check_tiling,
)
from shardwise.sharded.specs import (
    ShardingSpec,
    as_size,
    as_spec,
    build_checked_metadata,
    checked_spec,
    infer_spec,
)
from shardwise.sharded.tensor import ShardedTensor
from shardwise.sharded.transfer import ShardMove

# ---- of shards that each rank has


@dataclass
class _LocalDescription:
    """The description of a rank's shards that it sends to the others."""

    size: tuple[int | None, ...]
    shards: list[ShardMetadata]
    properties: list[TensorProperties]
    """One entry for the tensor of each shard."""
    problem: RankProblem | None = None


def from_local_shards(
    local_shards: Sequence[Shard],
    *global_size: Any,
    process_group: GroupLike = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """Make a sharded tensor of the shards that each rank has; all ranks call it.

    Shards that do not fit are refused on all ranks; the error names the ranks and the property.

    Arguments:
        local_shards: the shards of this rank; perhaps none.
        global_size: numbers, or one sequence of them. If some are None, the shards are stacked
            along dim 0 in the order of the ranks: their offsets, and the sizes that are None, are
            computed.
        process_group: the ranks that take part; all by default.
        init_rrefs: as for `ShardedTensor`.
    """
    group = as_rank_group(process_group)
    with remote.guard_exchange(group, init_rrefs):
        description = _describe_local_shards(local_shards, global_size, group)
    gathered: list[_LocalDescription] = group.communicator.gather_objects(description)
    raise_problems(group, [each.problem for each in gathered])
    check_agreement(group, [{"global_size": each.size} for each in gathered])
    properties = _agree_on_properties(group, gathered)
    if None in description.size:
        shards, size = _stack_shards(group, gathered)
    else:
        shards = [each for theirs in gathered for each in theirs.shards]
        size = as_size(description.size, "global_size")
    check_tiling(shards, size)
    metadata = ShardedTensorMetadata(shards, size, properties)
    tensors = [each.tensor for each in local_shards]
    return ShardedTensor._from_parts(
        metadata, infer_spec(shards, size), tensors, group, init_rrefs=init_rrefs
    )


def _describe_local_shards(
    local_shards: Any, global_size: Any, group: RankGroup
) -> _LocalDescription:
    """Return the description of this rank's shards for the others, with the first error in them."""
    sizes = global_size
    if len(sizes) == 1 and isinstance(sizes[0], Sequence):
        (sizes,) = sizes
    description = _LocalDescription((), [], [])
    try:
        as_size([0 if each is None else each for each in sizes], "global_size")
        description.size = tuple(None if each is None else int(each) for each in sizes)
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
            description.shards.append(shard.metadata)
            description.properties.append(TensorProperties.common_to(shard.tensor))
    except Exception as error:  # whatever it is, all ranks must get it
        description.problem = RankProblem.of(error)
    return description


def _agree_on_properties(group: RankGroup, gathered: list[_LocalDescription]) -> TensorProperties:
    """Return the properties that all shards of all ranks have in common; refuse differences."""
    found = [
        (rank, at, each)
        for rank, theirs in zip(group.ranks, gathered, strict=True)
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
    """Yield the name and both values of each property that differs. Memory formats are not
    compared, as a tensor has none."""
    for name in ("dtype", "layout", "requires_grad", "pin_memory"):
        pair = getattr(one, name), getattr(other, name)
        if pair[0] != pair[1]:
            yield name, *pair


def _stack_shards(
    group: RankGroup, gathered: list[_LocalDescription]
) -> tuple[list[ShardMetadata], torch.Size]:
    """Return all shards, stacked along dim 0 in the order of the ranks, and the global size."""
    size = gathered[0].size
    found: list[int] = []
    rows = 0
    shards = []
    for rank, theirs in zip(group.ranks, gathered, strict=True):
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
    """Make a sharded tensor of which each rank has one shard. Only `init_rrefs` communicates.

    Arguments:
        local_tensor: the shard that the spec gives to this rank.
        sharding_spec: how the whole tensor is cut: one shard for each rank.
        global_size: numbers, or one sequence of them.
    """
    group = as_rank_group(process_group)
    with remote.guard_exchange(group, init_rrefs):
        as_spec(sharding_spec, "sharding_spec")
        if not isinstance(local_tensor, torch.Tensor):
            raise ShardedTensorError(f"local_tensor: expected a tensor, got {local_tensor!r}")
        properties = TensorProperties.common_to(local_tensor)
        metadata = build_checked_metadata(
            sharding_spec, as_size(global_size, "global_size"), properties
        )
        checked_spec(metadata, sharding_spec)
        ownership = ShardOwnership.of(metadata.shards_metadata, group)
        shards = local_metadata(metadata, ownership, group)
        if group.is_outside:
            return ShardedTensor._from_parts(metadata, sharding_spec, [], group, ownership)
        if len(shards) != 1:
            raise ShardedTensorError(
                f"sharding_spec: expected one shard for each rank, this one gets {len(shards)}; "
                "use init_from_local_shards"
            )
        _check_against([Shard(local_tensor, shards[0])], metadata, shards)
    return ShardedTensor._from_parts(
        metadata, sharding_spec, [local_tensor], group, ownership, init_rrefs
    )


def from_local_shards_and_global_metadata(
    local_shards: Sequence[Shard],
    sharded_tensor_metadata: ShardedTensorMetadata,
    process_group: GroupLike = None,
    init_rrefs: bool = False,
    sharding_spec: ShardingSpec | None = None,
) -> ShardedTensor:
    """Make a sharded tensor of this rank's shards and the metadata of all. Only `init_rrefs`
    communicates.

    This rank's shards are checked against the metadata, which must be the same on every rank.

    Arguments:
        local_shards: the shards of this rank, in the order of the metadata.
        sharded_tensor_metadata: the shards of all ranks.
        sharding_spec: how the tensor is cut; inferred from the metadata by default.
    """
    group = as_rank_group(process_group)
    metadata = sharded_tensor_metadata.copy()  # requires_grad_ writes to it
    with remote.guard_exchange(group, init_rrefs):
        spec = checked_spec(metadata, sharding_spec)
        ownership = ShardOwnership.of(metadata.shards_metadata, group)
        _check_against(local_shards, metadata, local_metadata(metadata, ownership, group))
    tensors = [each.tensor for each in local_shards]
    return ShardedTensor._from_parts(metadata, spec, tensors, group, ownership, init_rrefs)


def _check_against(
    local_shards: Sequence[Shard], metadata: ShardedTensorMetadata, expected: list[ShardMetadata]
) -> None:
    """Refuse shards of this rank that differ from the metadata."""
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


# ---- of a tensor that one rank has


def shard_by_spec(
    self: ShardingSpec, tensor: torch.Tensor, src_rank: int = 0, process_group: GroupLike = None
) -> ShardedTensor:
    """Shard a tensor that one rank has whole; all ranks call it.

    Arguments:
        tensor: on ranks other than the source, only its shape and dtype count.
        src_rank: the rank whose elements are taken, as an index in the process group.
        process_group: the ranks that take part; all by default.
    """
    group = as_rank_group(process_group)
    index, metadata = _agree_on_scatter(tensor, self, src_rank, group)
    ownership, source = ShardOwnership.of(metadata.shards_metadata, group), group.ranks[index]
    own = local_metadata(metadata, ownership, group)
    given = [tensor.detach()] if source == group.rank else []
    # On other ranks than the source, the tensor may be on the meta device.
    device = torch.device("cpu") if tensor.is_meta else tensor.device
    like = torch.empty(0, dtype=tensor.dtype, device=device)
    pieces = [like.new_empty(each.shard_sizes) for each in own]
    ShardMove(
        group, ShardOwnership.whole(tensor.shape, source), ownership, "ShardingSpec.shard"
    ).run(given, like, pieces)
    shards = [
        piece.to(each.device).requires_grad_(tensor.requires_grad)
        for piece, each in zip(pieces, own, strict=True)
    ]
    return ShardedTensor._from_parts(metadata, self, shards, group, ownership)


@dataclass
class _ScatterRequest:
    """The arguments of a scatter that a rank sends to the others."""

    facts: dict[str, Any] = field(default_factory=dict)
    """The values that must be the same on every rank, by name."""
    problem: RankProblem | None = None


def _agree_on_scatter(
    tensor: torch.Tensor, spec: ShardingSpec, src_rank: int, group: RankGroup
) -> tuple[int, ShardedTensorMetadata]:
    """Return the index of the source and the shards; refuse ranks that ask for different ones."""
    request = _ScatterRequest()
    try:
        index = as_int(src_rank)
        if index is None or not 0 <= index < len(group.ranks):
            raise ShardedTensorError(
                f"src_rank: expected an index in the process group, from 0 to "
                f"{len(group.ranks) - 1}; got {src_rank!r}"
            )
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise ShardedTensorError(f"tensor: expected a dense tensor, got {tensor!r}")
        if tensor.is_meta and group.ranks[index] == group.rank:
            raise ShardedTensorError(
                "tensor: expected elements on the rank that they are taken from, got a tensor on "
                "the meta device"
            )
        request.facts = {
            "src_rank": index,
            "tensor.shape": tuple(tensor.shape),
            "tensor.dtype": str(tensor.dtype),
            "tensor.requires_grad": tensor.requires_grad,
        }
        properties = TensorProperties.common_to(tensor)
        properties.pin_memory = False
        metadata = build_checked_metadata(spec, tensor.shape, properties)
        group.owners(metadata.shards_metadata)
        request.facts["sharding_spec"] = str(metadata.shards_metadata)
    except Exception as error:  # whatever it is, all ranks must get it
        request.problem = RankProblem.of(error)
    gathered: list[_ScatterRequest] = group.communicator.gather_objects(request)
    check_agreement(group, [each.facts for each in gathered])
    raise_problems(group, [each.problem for each in gathered])
    assert index is not None, "else there was a problem"
    return index, metadata


# ---- of one value or of random numbers, with the keywords of `ShardedTensor`


def empty(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Make a sharded tensor with uninitialized memory."""
    return ShardedTensor(sharding_spec, *size, **options)


def zeros(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Make a sharded tensor of zeros."""
    return full(sharding_spec, size, 0, **options)


def ones(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Make a sharded tensor of ones."""
    return full(sharding_spec, size, 1, **options)


def full(sharding_spec: ShardingSpec, size: Any, fill_value: Any, **options: Any) -> ShardedTensor:
    """Make a sharded tensor that is filled with one value.

    Arguments:
        size: a number or a sequence of them.
        fill_value: the value. Unlike in torch.full, it does not decide the dtype.
    """

    def fill(made: ShardedTensor) -> None:
        with torch.no_grad():
            for shard in made.local_shards():
                shard.tensor.fill_(fill_value)

    sizes = size if isinstance(size, Sequence) else (size,)
    return _filled(fill, sharding_spec, sizes, **options)


def rand(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Make a sharded tensor of random numbers, uniform in [0, 1)."""
    return _filled(init.uniform_, sharding_spec, size, **options)


def randn(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Make a sharded tensor of random numbers, normally distributed."""
    return _filled(init.normal_, sharding_spec, size, **options)


def _filled(
    fill: Callable[[ShardedTensor], Any],
    spec: ShardingSpec,
    size: Sequence[Any],
    process_group: GroupLike = None,
    init_rrefs: bool = False,
    **options: Any,
) -> ShardedTensor:
    """Make a sharded tensor and fill it before other ranks get references to its shards."""
    group = as_rank_group(process_group)
    with remote.guard_exchange(group, init_rrefs):
        made = ShardedTensor(spec, *size, process_group=group, **options)
    fill(made)
    return made._set_shards(group, made._ownership, made._local_shards, init_rrefs)


# These methods are set here, as this module builds on the classes. The names are torch's.
ShardingSpec.shard = shard_by_spec
ShardedTensor._init_from_local_shards = staticmethod(from_local_shards)  # type: ignore[attr-defined]
ShardedTensor._init_from_local_tensor = staticmethod(from_local_tensor)  # type: ignore[attr-defined]
ShardedTensor._init_from_local_shards_and_global_metadata = staticmethod(  # type: ignore[assignment]
    from_local_shards_and_global_metadata
)
