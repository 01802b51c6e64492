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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from shardwise.sharded import workers
from shardwise.sharded.errors import ShardedStateError, ShardedTensorError
from shardwise.sharded.group import Group

if TYPE_CHECKING:
    from shardwise.sharded.local import LocalShards


class References(dict[int, list[Any]]):
    """The references (`torch.distributed.rpc.RRef`) that a rank has got, by the owner's rank."""


_delivered: WeakValueDictionary[int, References] = WeakValueDictionary()
_numbers = itertools.count()


@dataclass(frozen=True)
class _Entry:
    """What a rank tells the others when they meet."""

    worker: int | None
    """Its rank among the RPC workers, if they run."""
    number: int = -1
    """Under which references are delivered to it."""
    problem: str = ""
    is_value: bool = False
    """Whether the problem is with what was given, or with what is around."""


@contextmanager
def together(group: Group, init_rrefs: bool) -> Iterator[None]:
    """What a rank raises in here, all ranks of the group refuse.

    Comes before `register`, where the others would wait for it. If RPC is not as it must be, they
    do not even begin.
    """
    if not init_rrefs:
        yield
        return
    worker = workers.own_rank()
    _check(group, group.communicator.gather_objects(_Entry(worker)))
    try:
        yield
    except Exception as error:
        entry = _Entry(worker, problem=str(error), is_value=isinstance(error, ValueError))
        group.communicator.gather_objects(entry)
        raise


def register(tensor: LocalShards) -> None:
    """Give every rank references to this rank's shards, and get theirs; all ranks call it."""
    group, references, number = tensor._group, References(), next(_numbers)
    _delivered[number] = tensor._references = references
    entries = group.communicator.gather_objects(_Entry(workers.own_rank(), number))
    _check(group, entries)
    numbers = {rank: each.number for rank, each in zip(group.ranks, entries, strict=True)}
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


def _check(group: Group, entries: list[_Entry]) -> None:
    missing = [rank for rank, each in zip(group.ranks, entries, strict=True) if each.worker is None]
    if missing:
        raise ShardedStateError(
            f"init_rrefs: expected RPC to run on every rank, for references to remote shards; it "
            f"does not on ranks {missing}; {workers.how_to_start()}"
        )
    for rank, each in zip(group.ranks, entries, strict=True):
        if each.worker != rank:
            raise ShardedTensorError(
                f"init_rrefs: expected the same rank among the processes and among the RPC "
                f"workers; rank {rank} of the processes is {each.worker} among the workers"
            )
        if each.problem:
            kind = ShardedTensorError if each.is_value else ShardedStateError
            raise kind(f"rank {rank} could not make its shards: {each.problem}")
