"""Remote shards: every rank's references to the shards of the others, over RPC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.sharded import workers

if TYPE_CHECKING:
    from shardwise.sharded.local import LocalShards


def check(init_rrefs: bool) -> None:
    """Refuse references to remote shards where RPC is not running."""
    if init_rrefs:
        workers.check_running("init_rrefs: expected references to remote shards")


def register(tensor: LocalShards) -> None:
    """Give every rank references to this rank's shards, and get theirs; all ranks call it."""
    check(True)


def references(tensor: LocalShards) -> dict[int, list[Any]]:
    """The references that the other ranks gave, by rank."""
    return {}
