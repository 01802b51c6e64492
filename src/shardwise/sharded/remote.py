"""Remote shards: each rank's references to the shards of the other ranks, over RPC.

Each rank numbers its own sharded tensors. The other ranks deliver references to their shards under
that number; ranks tell each other their numbers first, as they may have made different numbers of
tensors. The table of deliveries is weak: references die with the tensor that has them, and the
shards that they refer to can be freed when no rank has references any more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch

from shardwise.core.errors import ShardedStateError, ShardedTensorError
from shardwise.sharded.group import (
    RankGroup,
    raise_on_all_ranks,
    rpc_ranks_by_name,
    rpc_start_hint,
    running_rpc,
)
from shardwise.sharded.metadata import Shard


class References(dict[int, list[Any]]):
    """The references (`torch.distributed.rpc.RRef`) that a rank has got, by the owner's rank."""


_delivered: WeakValueDictionary[int, References] = WeakValueDictionary()
_numbers = itertools.count()


@contextmanager
def guard_exchange(group: RankGroup, init_rrefs: bool) -> Iterator[None]:
    """Raise an error of the block on all ranks, if references are to be exchanged after it.

    Otherwise the other ranks would deadlock in the exchange. If RPC is not ready, the block does
    not run at all. Without `init_rrefs` this does nothing.
    """
    if not init_rrefs:
        yield
        return
    _check_rpc_ranks(group, group.communicator.gather_objects(_own_rpc_rank()))
    with raise_on_all_ranks(group):
        yield


def exchange_references(group: RankGroup, shards: Sequence[Shard]) -> References:
    """Send references to this rank's shards to all ranks, and return theirs; all ranks call it."""
    references, number = References(), next(_numbers)
    _delivered[number] = references
    gathered = group.communicator.gather_objects((_own_rpc_rank(), number))
    _check_rpc_ranks(group, [rpc_rank for rpc_rank, _ in gathered])
    numbers = {rank: theirs for rank, (_, theirs) in zip(group.ranks, gathered, strict=True)}
    del numbers[group.rank]
    problem = ""
    try:
        _deliver(shards, group.rank, numbers)
    except Exception as error:  # rpc raises what the other side raised
        problem = f"{type(error).__name__}: {error}"
    problems = group.communicator.gather_objects(problem)
    for rank, problem in zip(group.ranks, problems, strict=True):
        if problem:
            raise ShardedStateError(
                f"init_rrefs: rank {rank} could not deliver references to its shards: {problem}"
            )
    return references


def _deliver(shards: Sequence[Shard], own_rank: int, numbers: dict[int, int]) -> None:
    """Send references to this rank's shards to other ranks, under the number that each has told."""
    from torch.distributed import rpc  # only where RPC is used

    if not shards:
        return
    references = [rpc.RRef(shard) for shard in shards]
    names = _rpc_names_by_rank()
    sent = [
        rpc.rpc_async(names[rank], _receive, (number, own_rank, references))
        for rank, number in numbers.items()
    ]
    torch.futures.wait_all(sent)


def _receive(number: int, rank: int, references: list[Any]) -> None:
    """Store references that a rank has sent; runs in the RPC worker of the receiver."""
    _delivered[number][rank] = references


def _check_rpc_ranks(group: RankGroup, rpc_ranks: list[int | None]) -> None:
    """Check that RPC runs on all ranks, with the same ranks as the processes have."""
    pairs = list(zip(group.ranks, rpc_ranks, strict=True))
    missing = [rank for rank, rpc_rank in pairs if rpc_rank is None]
    if missing:
        raise ShardedStateError(
            f"init_rrefs: expected RPC to run on every rank, for references to remote shards; it "
            f"does not on ranks {missing}; {rpc_start_hint()}"
        )
    for rank, rpc_rank in pairs:
        if rpc_rank != rank:
            raise ShardedTensorError(
                f"init_rrefs: expected the same rank among the processes and among the RPC "
                f"workers; rank {rank} of the processes is {rpc_rank} among the workers"
            )


def _own_rpc_rank() -> int | None:
    """Return this rank's number among the RPC workers; None if RPC is not running."""
    rpc = running_rpc()
    return None if rpc is None else rpc.get_worker_info().id


def _rpc_names_by_rank() -> dict[int, str]:
    """Return the name of each RPC worker, by rank; RPC must be running."""
    return {rank: name for name, rank in rpc_ranks_by_name("a worker is asked for").items()}
