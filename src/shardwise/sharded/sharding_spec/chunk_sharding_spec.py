"""The names of torch.distributed._shard.sharding_spec.chunk_sharding_spec."""

from shardwise.sharded import ChunkShardingSpec, Shard, ShardingSpec, ShardMetadata
from shardwise.sharded.specs import get_chunked_dim_size, get_split_size

__all__ = [
    "ChunkShardingSpec",
    "Shard",
    "ShardMetadata",
    "ShardingSpec",
    "get_chunked_dim_size",
    "get_split_size",
]
