"""The pickle of a sharded tensor: a rank's shards, and who it was among how many.

A rank gets back what it saved: who it is must be the same. Checkpoints, which can be loaded by
other ranks in other shards, are the business of torch.distributed.checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from shardwise import world
from shardwise.comm.buffers import owned
from shardwise.sharded import remote
from shardwise.sharded.base import bare
from shardwise.sharded.errors import ShardedStateError
from shardwise.sharded.group import Group, GroupLike, as_group
from shardwise.sharded.held import Held, mine
from shardwise.sharded.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.sharded.shard import Shard, is_on
from shardwise.sharded.specs import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    inferred_spec,
)
from shardwise.torch_internals import PARAMETER_FLAG, RemoteDevice

if TYPE_CHECKING:
    from shardwise.sharded.tensor import ShardedTensor


@dataclass(frozen=True)
class ProcessGroupState:
    """Which rank of how many saved a tensor: in its process group ("local") and among all."""

    local_rank: int
    global_rank: int
    local_world_size: int
    global_world_size: int

    @staticmethod
    def of(group: Group) -> ProcessGroupState:
        """Of the calling rank."""
        local_rank = group.ranks.index(group.rank)
        return ProcessGroupState(local_rank, group.rank, len(group.ranks), world.current().size)


State: TypeAlias = (
    "tuple[list[Shard], ShardedTensorMetadata, ProcessGroupState, ShardingSpec, bool]"
)


# ---- with which process group


class _Loading(threading.local):
    """Simulated ranks are threads, and each loads its own."""

    group: Group | None = None


_loading = _Loading()


@contextmanager
def load_with_process_group(process_group: GroupLike) -> Iterator[GroupLike]:
    """Within it, sharded tensors that are unpickled are of this process group; else of all ranks.

    Arguments:
        process_group: a ProcessGroup or a DeviceMesh, as for `ShardedTensor`.

    Example:
        >>> with load_with_process_group(group):
        ...     x = torch.load("x.pt")
    """
    if _loading.group is not None:
        raise ShardedStateError(
            "load_with_process_group: expected no other one around it; this one is inside one of "
            f"ranks {_loading.group.ranks}"
        )
    _loading.group = as_group(process_group)
    try:
        yield process_group
    finally:
        _loading.group = None


# ---- there and back


def state_of(tensor: ShardedTensor) -> State:
    """What is saved. What autograd has recorded is not, as for a plain tensor."""
    shards = [Shard(_alone(each.tensor), each.metadata.copy()) for each in tensor._local_shards]
    return (
        shards,
        tensor._metadata.copy(),
        ProcessGroupState.of(tensor._group),
        tensor._sharding_spec,
        tensor._init_rrefs,
    )


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as a leaf, in memory that holds nothing else, which would be saved too."""
    return owned(tensor.detach()).requires_grad_(tensor.requires_grad)


def restore(tensor: ShardedTensor, state: State) -> None:
    """Become what was saved; all ranks do, if it had references to remote shards."""
    shards, metadata, saved, spec, init_rrefs = state
    group = Group() if _loading.group is None else _loading.group
    with remote.together(group, init_rrefs):
        _check(saved, ProcessGroupState.of(group))
        if metadata.size != tensor.shape or metadata.tensor_properties.dtype != tensor.dtype:
            raise ShardedStateError(
                f"__setstate__: expected the state of a tensor like this one, of size "
                f"{tuple(tensor.shape)} and {tensor.dtype}; got one of size "
                f"{tuple(metadata.size)} and {metadata.tensor_properties.dtype}"
            )
        held = Held.of(metadata.shards_metadata, group)
        own = mine(metadata, held, group)
        if len(own) != len(shards):
            raise ShardedStateError(
                f"__setstate__: expected {len(own)} local shards, as many as the metadata gives "
                f"to this rank; got {len(shards)}"
            )
        shards = [Shard(each.tensor, known) for each, known in zip(shards, own, strict=True)]
    tensor._metadata, tensor._sharding_spec = metadata, spec
    tensor._become(group, held, shards, init_rrefs)
    tensor._note_requires_grad(metadata.tensor_properties.requires_grad)


def _check(saved: ProcessGroupState, here: ProcessGroupState) -> None:
    for each in fields(ProcessGroupState):
        before, now = getattr(saved, each.name), getattr(here, each.name)
        if before != now:
            hint = "load it on the rank that saved it, among as many"
            if each.name.startswith("local"):
                hint += (
                    "; if it was of a process group, load it "
                    "`with shardwise.sharded.load_with_process_group(group)`"
                )
            raise ShardedStateError(
                f"{each.name}: it was {before} when the tensor was saved, and is {now} here; {hint}"
            )


def reduced(tensor: ShardedTensor) -> tuple[Any, ...]:
    """How it is pickled."""
    is_param = getattr(tensor, PARAMETER_FLAG, False)
    return _rebuilt, (type(tensor), tensor._like(), tensor.__getstate__(), is_param)


def _rebuilt(
    kind: type[ShardedTensor], like: torch.Tensor, state: State, is_param: bool
) -> ShardedTensor:
    """A sharded tensor from its pickle.

    Arguments:
        like: empty, but where `torch.load(map_location=...)` puts tensors; this is how a rank
            without shards knows.
    """
    shards, metadata, saved, spec, init_rrefs = state
    if not is_on(like, (shards[0].metadata if shards else metadata.shards_metadata[0]).device):
        metadata = metadata.copy(torch.device(like.device.type))
        spec = inferred_spec(metadata.shards_metadata, metadata.size)
    made = bare(kind, spec, metadata, [])
    made.__setstate__((shards, metadata, saved, spec, init_rrefs))
    if is_param:
        setattr(made, PARAMETER_FLAG, True)
    return made


SAFE: list[Any] = [
    _rebuilt,
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ProcessGroupState,
    RemoteDevice,
    Shard,
    ShardMetadata,
    ShardedTensorMetadata,
    TensorProperties,
]
"""What a pickle is made of besides the class."""
