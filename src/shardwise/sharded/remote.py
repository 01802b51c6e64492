"""Remote shards: every rank's references to the shards of the others, over RPC.

A tensor has a number on each rank, under which the others deliver references to their shards there;
the numbers are told, as ranks may have made different numbers of tensors. The table from numbers to
what has been delivered is weak: a tensor that goes takes its references along, and when no rank
has any left, the shards they were of can go too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from shardwise.sharded import workers
from shardwise.sharded.agreeing import objections
from shardwise.sharded.errors import ShardedStateError, ShardedTensorError
from shardwise.sharded.group import Group

if TYPE_CHECKING:
    from shardwise.sharded.local import LocalShards


class References(dict[int, list[Any]]):
    """The references (`torch.distributed.rpc.RRef`) that a rank has got, by the owner's rank."""


_delivered: WeakValueDictionary[int, References] = WeakValueDictionary()
_numbers = itertools.count()


@contextmanager
def together(group: Group, init_rrefs: bool) -> Iterator[None]:
    """What a rank raises in here, all ranks of the group refuse: they would wait for it later, when
    references are exchanged. If RPC is not as it must be, they do not even begin.
    """
    if not init_rrefs:
        yield
        return
    _check(group, group.communicator.gather_objects(workers.own_rank()))
    with objections(group):
        yield


def register(tensor: LocalShards) -> None:
    """Give every rank references to this rank's shards, and get theirs; all ranks call it."""
    group, references, number = tensor._group, References(), next(_numbers)
    _delivered[number] = tensor._references = references
    told = group.communicator.gather_objects((workers.own_rank(), number))
    _check(group, [worker for worker, _ in told])
    numbers = {rank: theirs for rank, (_, theirs) in zip(group.ranks, told, strict=True)}
    del numbers[group.rank]
    problem = ""
    try:
        _deliver(tensor, numbers)
    except Exception as error:  # rpc raises what the other side raised
        problem = f"{type(error).__name__}: {error}"
    problems = group.communicator.gather_objects(problem)
    for rank, problem in zip(group.ranks, problems, strict=True):
        if problem:
            raise ShardedStateError(
                f"init_rrefs: rank {rank} could not deliver references to its shards: {problem}"
            )


def _deliver(tensor: LocalShards, numbers: dict[int, int]) -> None:
    """Send references to this rank's shards to each of the others."""
    from torch.distributed import rpc

    if not tensor._local_shards:
        return
    references = [rpc.RRef(shard) for shard in tensor._local_shards]
    names = workers.names_by_rank()
    sent = [
        rpc.rpc_async(names[rank], _take, (number, tensor._group.rank, references))
        for rank, number in numbers.items()
    ]
    torch.futures.wait_all(sent)


def _take(number: int, rank: int, references: list[Any]) -> None:
    """Run by the RPC worker of the rank that gets references."""
    _delivered[number][rank] = references


def _check(group: Group, ranks: list[int | None]) -> None:
    """Refuse ranks among the RPC workers that are not those of the processes."""
    missing = [rank for rank, worker in zip(group.ranks, ranks, strict=True) if worker is None]
    if missing:
        raise ShardedStateError(
            f"init_rrefs: expected RPC to run on every rank, for references to remote shards; it "
            f"does not on ranks {missing}; {workers.how_to_start()}"
        )
    for rank, worker in zip(group.ranks, ranks, strict=True):
        if worker != rank:
            raise ShardedTensorError(
                f"init_rrefs: expected the same rank among the processes and among the RPC "
                f"workers; rank {rank} of the processes is {worker} among the workers"
            )
