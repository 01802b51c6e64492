"""The pickle of a sharded tensor: a rank's shards, and its rank and the number of ranks.

A rank gets back what it saved, so its rank must be the same. Checkpoints that other ranks can load
into other shards are made by torch.distributed.checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch

from shardwise.comm.buffers import with_own_storage
from shardwise.core import world
from shardwise.core.errors import ShardedStateError
from shardwise.sharded import remote
from shardwise.sharded.base import ShardedTensorCore, new_wrapper
from shardwise.sharded.group import (
    GroupLike,
    RankGroup,
    ShardOwnership,
    as_rank_group,
    local_metadata,
)
from shardwise.sharded.metadata import (
    Shard,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    is_on,
)
from shardwise.sharded.specs import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    infer_spec,
)
from shardwise.torch_internals import PARAMETER_FLAG, RemoteDevice


@dataclass(frozen=True)
class ProcessGroupState:
    """The rank that saved a tensor and the number of ranks: in its process group ("local") and in
    the world."""

    local_rank: int
    global_rank: int
    local_world_size: int
    global_world_size: int

    @staticmethod
    def of(group: RankGroup) -> ProcessGroupState:
        """Return the state of the calling rank."""
        local_rank = -1 if group.is_outside else group.ranks.index(group.rank)
        return ProcessGroupState(local_rank, group.rank, len(group.ranks), world.current().size)


PickledState: TypeAlias = (
    "tuple[list[Shard], ShardedTensorMetadata, ProcessGroupState, ShardingSpec, bool]"
)


class _LoadingGroup(threading.local):
    """The process group of `load_with_process_group`; one per thread, as simulated ranks are
    threads."""

    group: RankGroup | None = None


_loading = _LoadingGroup()


@contextmanager
def load_with_process_group(process_group: GroupLike) -> Iterator[GroupLike]:
    """Unpickle sharded tensors inside this block with this process group, instead of with all
    ranks.

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
    _loading.group = as_rank_group(process_group)
    try:
        yield process_group
    finally:
        _loading.group = None


def current_process_group() -> Any:
    """Return the group of the `load_with_process_group` around the call; that of all ranks outside
    of one."""
    return (_loading.group or RankGroup()).handle


def state_of(tensor: ShardedTensorCore) -> PickledState:
    """Return the state that is pickled. It has no autograd history, as for a plain tensor."""
    shards = [Shard(_own_copy(each.tensor), each.metadata.copy()) for each in tensor._local_shards]
    return (
        shards,
        tensor._metadata.copy(),
        ProcessGroupState.of(tensor._group),
        tensor._sharding_spec,
        tensor._init_rrefs,
    )


def _own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a leaf in memory of its own: pickle saves all memory of a storage."""
    return with_own_storage(tensor.detach()).requires_grad_(tensor.requires_grad)


def restore(tensor: ShardedTensorCore, state: PickledState) -> None:
    """Set a tensor to a saved state; all ranks do this, if it had references to remote shards."""
    shards, metadata, saved, spec, init_rrefs = state
    group = RankGroup() if _loading.group is None else _loading.group
    with remote.guard_exchange(group, init_rrefs):
        _check_same_ranks(saved, ProcessGroupState.of(group))
        if metadata.size != tensor.shape or metadata.tensor_properties.dtype != tensor.dtype:
            raise ShardedStateError(
                f"__setstate__: expected the state of a tensor like this one, of size "
                f"{tuple(tensor.shape)} and {tensor.dtype}; got one of size "
                f"{tuple(metadata.size)} and {metadata.tensor_properties.dtype}"
            )
        ownership = ShardOwnership.of(metadata.shards_metadata, group)
        own = local_metadata(metadata, ownership, group)
        if len(own) != len(shards):
            raise ShardedStateError(
                f"__setstate__: expected {len(own)} local shards, as many as the metadata gives "
                f"to this rank; got {len(shards)}"
            )
        shards = [Shard(each.tensor, known) for each, known in zip(shards, own, strict=True)]
    tensor._metadata, tensor._sharding_spec = metadata, spec
    tensor._set_shards(group, ownership, shards, init_rrefs)
    tensor._set_requires_grad_flag(metadata.tensor_properties.requires_grad)


def _check_same_ranks(saved: ProcessGroupState, current: ProcessGroupState) -> None:
    """Refuse to load on another rank, or among another number of ranks."""
    for each in fields(ProcessGroupState):
        before, now = getattr(saved, each.name), getattr(current, each.name)
        if before != now:
            hint = "load it on the rank that saved it, among as many ranks"
            if each.name.startswith("local"):
                hint += (
                    "; if it was of a process group, load it "
                    "`with shardwise.sharded.load_with_process_group(group)`"
                )
            raise ShardedStateError(
                f"{each.name}: it was {before} when the tensor was saved, and is {now} here; {hint}"
            )


def reduce(tensor: ShardedTensorCore) -> tuple[Any, ...]:
    """Return what `__reduce_ex__` returns: a function, and arguments from which it makes the
    tensor."""
    is_param = getattr(tensor, PARAMETER_FLAG, False)
    return _rebuild, (type(tensor), tensor._prototype(), tensor.__getstate__(), is_param)


def _rebuild(
    kind: type[ShardedTensorCore], like: torch.Tensor, state: PickledState, is_param: bool
) -> ShardedTensorCore:
    """Make a sharded tensor from its pickle.

    Arguments:
        like: an empty tensor on the device that `torch.load(map_location=...)` chose; a rank
            without shards knows the device from it.
    """
    shards, metadata, saved, spec, init_rrefs = state
    if not is_on(like, (shards[0].metadata if shards else metadata.shards_metadata[0]).device):
        metadata = metadata.copy(torch.device(like.device.type))
        spec = infer_spec(metadata.shards_metadata, metadata.size)
    tensor: Any = new_wrapper(kind, spec, metadata, [])
    tensor.__setstate__((shards, metadata, saved, spec, init_rrefs))
    if is_param:
        setattr(tensor, PARAMETER_FLAG, True)
    return tensor  # type: ignore[no-any-return]


SAFE_GLOBALS: list[Any] = [
    _rebuild,
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ProcessGroupState,
    RemoteDevice,
    Shard,
    ShardMetadata,
    ShardedTensorMetadata,
    TensorProperties,
]
"""The functions and classes in a pickle, besides the class of the tensor."""
