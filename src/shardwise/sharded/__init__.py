"""Sharded tensors: described by explicit shards, as recommender systems and checkpoints use them.

The names are those of torch.distributed._shard and its submodules.
"""

from shardwise.sharded import operators as _operators  # noqa: F401 (gives the class its functions)
from shardwise.sharded.base import ShardedTensorBase
from shardwise.sharded.boxes import check_apart as validate_non_overlapping_shards_metadata
from shardwise.sharded.building import from_local_shards as init_from_local_shards
from shardwise.sharded.building import (
    from_local_shards_and_global_metadata as init_from_local_shards_and_global_metadata,
)
from shardwise.sharded.building import from_local_tensor as init_from_local_tensor
from shardwise.sharded.converting import from_dtensor, to_dtensor
from shardwise.sharded.errors import ShardedStateError, ShardedTensorError
from shardwise.sharded.factories import empty, full, ones, rand, randn, zeros
from shardwise.sharded.metadata import (
    MEM_FORMAT_ENCODING,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from shardwise.sharded.modules import (
    collect_local_shard,
    pre_load_state_dict_hook,
    reshard_output,
    shard_module,
    shard_parameter,
    shard_tensor,
    state_dict_hook,
)
from shardwise.sharded.optimizer import ShardedOptimizer, named_params_with_sharded_tensor
from shardwise.sharded.plan import Sharder, ShardingPlan, ShardingPlanner
from shardwise.sharded.registered import custom_sharded_op_impl, custom_sharding_spec_op
from shardwise.sharded.saving import load_with_process_group
from shardwise.sharded.shard import Shard, narrow_tensor, narrow_tensor_by_index
from shardwise.sharded.specs import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardingSpec,
    get_chunked_dim_size,
    get_split_size,
)
from shardwise.sharded.tensor import ShardedTensor
from shardwise.stored import CheckpointStager

# The names that these have in torch.
_collect_local_shard = collect_local_shard
_reshard_output = reshard_output
_shard_tensor = shard_tensor

__all__ = [
    "MEM_FORMAT_ENCODING",
    "CheckpointStager",
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "PlacementSpec",
    "Shard",
    "ShardMetadata",
    "ShardedOptimizer",
    "ShardedStateError",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorError",
    "ShardedTensorMetadata",
    "Sharder",
    "ShardingPlan",
    "ShardingPlanner",
    "ShardingSpec",
    "TensorProperties",
    "collect_local_shard",
    "custom_sharded_op_impl",
    "custom_sharding_spec_op",
    "empty",
    "from_dtensor",
    "full",
    "get_chunked_dim_size",
    "get_split_size",
    "init_from_local_shards",
    "init_from_local_shards_and_global_metadata",
    "init_from_local_tensor",
    "load_with_process_group",
    "named_params_with_sharded_tensor",
    "narrow_tensor",
    "narrow_tensor_by_index",
    "ones",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "reshard_output",
    "shard_module",
    "shard_parameter",
    "shard_tensor",
    "state_dict_hook",
    "to_dtensor",
    "validate_non_overlapping_shards_metadata",
    "zeros",
]
