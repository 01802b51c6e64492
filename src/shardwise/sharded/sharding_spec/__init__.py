"""The names of torch.distributed._shard.sharding_spec."""

from shardwise.sharded import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardingSpec,
    ShardMetadata,
)
from shardwise.sharded.torch_helpers import (
    infer_sharding_spec_from_shards_metadata as _infer_sharding_spec_from_shards_metadata,
)

__all__ = [
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "PlacementSpec",
    "ShardMetadata",
    "ShardingSpec",
    "_infer_sharding_spec_from_shards_metadata",
]
