"""The names of torch.distributed._shard.sharding_spec._internals."""

from shardwise.sharded.metadata import ShardMetadata
from shardwise.sharded.metadata import check_no_overlap as validate_non_overlapping_shards_metadata
from shardwise.sharded.specs import get_chunked_dim_size, get_split_size
from shardwise.sharded.torch_helpers import (
    check_shard_metadata_pair_overlap as _check_shard_metadata_pair_overlap,
)
from shardwise.sharded.torch_helpers import check_tensor, get_chunk_sharding_params

__all__ = [
    "ShardMetadata",
    "_check_shard_metadata_pair_overlap",
    "check_tensor",
    "get_chunk_sharding_params",
    "get_chunked_dim_size",
    "get_split_size",
    "validate_non_overlapping_shards_metadata",
]
