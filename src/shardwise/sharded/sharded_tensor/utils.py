"""The names of torch.distributed._shard.sharded_tensor.utils."""

from shardwise.sharded.metadata import Shard, ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.sharded.metadata import check_no_overlap as validate_non_overlapping_shards_metadata
from shardwise.sharded.torch_helpers import (
    build_global_metadata,
    build_metadata_from_local_shards,
    check_tensor,
    recalc_global_sharded_tensor_metadata,
)
from shardwise.sharded.torch_helpers import (
    parse_and_validate_remote_device as _parse_and_validate_remote_device,
)

__all__ = [
    "Shard",
    "ShardMetadata",
    "ShardedTensorMetadata",
    "TensorProperties",
    "_parse_and_validate_remote_device",
    "build_global_metadata",
    "build_metadata_from_local_shards",
    "check_tensor",
    "recalc_global_sharded_tensor_metadata",
    "validate_non_overlapping_shards_metadata",
]
