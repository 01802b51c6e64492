"""The names of torch.distributed._shard.sharded_tensor.reshard."""

from shardwise.sharded.metadata import Shard, ShardMetadata
from shardwise.sharded.specs import get_chunked_dim_size, get_split_size
from shardwise.sharded.torch_helpers import (
    build_reshard_metadata,
    get_idx_from_placements,
    reshard_local_shard,
    reshuffle_local_shard,
)

__all__ = [
    "Shard",
    "ShardMetadata",
    "build_reshard_metadata",
    "get_chunked_dim_size",
    "get_idx_from_placements",
    "get_split_size",
    "reshard_local_shard",
    "reshuffle_local_shard",
]
