"""The names of torch.distributed._shard.sharding_spec.api."""

from shardwise.sharded import (
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardingSpec,
    ShardMetadata,
    custom_sharding_spec_op,
)
from shardwise.sharded.metadata import check_no_overlap as validate_non_overlapping_shards_metadata
from shardwise.sharded.specs import get_chunked_dim_size, get_split_size
from shardwise.sharded.torch_helpers import check_tensor
from shardwise.sharded.torch_helpers import (
    infer_sharding_spec_from_shards_metadata as _infer_sharding_spec_from_shards_metadata,
)

__all__ = [
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "PlacementSpec",
    "ShardMetadata",
    "ShardingSpec",
    "_infer_sharding_spec_from_shards_metadata",
    "check_tensor",
    "custom_sharding_spec_op",
    "get_chunked_dim_size",
    "get_split_size",
    "validate_non_overlapping_shards_metadata",
]
