"""The names of torch.distributed._shard.sharder."""

from shardwise.sharded.plan import Sharder

__all__ = ["Sharder"]
