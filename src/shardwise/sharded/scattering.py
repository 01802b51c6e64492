"""A tensor that one rank has whole becomes a sharded one.

As in `shardwise.sharded.building`, all ranks raise what one finds wrong with its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checks import as_int
from shardwise.sharded.agreeing import Problem, check_agreement, refuse_problems
from shardwise.sharded.building import made
from shardwise.sharded.errors import ShardedTensorError
from shardwise.sharded.group import Group, GroupLike, as_group
from shardwise.sharded.held import Held, mine
from shardwise.sharded.metadata import ShardedTensorMetadata, TensorProperties
from shardwise.sharded.moving import Move
from shardwise.sharded.specs import ShardingSpec, metadata_of

if TYPE_CHECKING:
    from shardwise.sharded.tensor import ShardedTensor


def scattered(
    tensor: torch.Tensor, spec: ShardingSpec, src_rank: int, process_group: GroupLike
) -> ShardedTensor:
    """A tensor that one rank has whole, cut up and sent out."""
    group = as_group(process_group)
    index, metadata = _agreed_cut(tensor, spec, src_rank, group)
    held, source = Held.of(metadata.shards_metadata, group), group.ranks[index]
    own = mine(metadata, held, group)
    given = [tensor.detach()] if source == group.rank else []
    # Elsewhere than at the source, the tensor may have no elements.
    device = torch.device("cpu") if tensor.is_meta else tensor.device
    like = torch.empty(0, dtype=tensor.dtype, device=device)
    pieces = [like.new_empty(each.shard_sizes) for each in own]
    Move(group, Held.whole(tensor.shape, source), held, "ShardingSpec.shard").run(
        given, like, pieces
    )
    shards = [
        piece.to(each.device).requires_grad_(tensor.requires_grad)
        for piece, each in zip(pieces, own, strict=True)
    ]
    return made(metadata, spec, shards, group, held)


@dataclass
class _Asked:
    """What a rank tells the others of the cut that it asks for."""

    facts: dict[str, Any] = field(default_factory=dict)
    """What must be the same on every rank, by name."""
    problem: Problem | None = None


def _agreed_cut(
    tensor: torch.Tensor, spec: ShardingSpec, src_rank: int, group: Group
) -> tuple[int, ShardedTensorMetadata]:
    """The index of the source and the shards, if all ranks ask for the same."""
    asked = _Asked()
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
        asked.facts = {
            "src_rank": index,
            "tensor.shape": tuple(tensor.shape),
            "tensor.dtype": str(tensor.dtype),
            "tensor.requires_grad": tensor.requires_grad,
        }
        properties = TensorProperties.common_to(tensor)
        properties.pin_memory = False
        metadata = metadata_of(spec, tensor.shape, properties)
        group.owners(metadata.shards_metadata)
        asked.facts["sharding_spec"] = str(metadata.shards_metadata)
    except Exception as error:  # whatever it is, nobody waits
        asked.problem = Problem.of(error)
    everywhere: list[_Asked] = group.communicator.gather_objects(asked)
    check_agreement(group, [each.facts for each in everywhere])
    refuse_problems(group, [each.problem for each in everywhere])
    assert index is not None, "checked"
    return index, metadata
