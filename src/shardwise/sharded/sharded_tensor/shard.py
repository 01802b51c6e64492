"""The names of torch.distributed._shard.sharded_tensor.shard."""

from shardwise.sharded.metadata import Shard, ShardMetadata

__all__ = ["Shard", "ShardMetadata"]
