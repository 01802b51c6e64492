"""Sharded tensors: described by explicit shards, as recommender systems and checkpoints use them.

The names are those of torch.distributed._shard and its submodules.
"""

from shardwise.core.errors import ShardedStateError, ShardedTensorError
from shardwise.dtensor.dcp import CheckpointStager
from shardwise.sharded import dispatch  # noqa: F401 - sets __torch_function__ of ShardedTensor
from shardwise.sharded.base import ShardedTensorBase
from shardwise.sharded.create import empty, full, ones, rand, randn, zeros
from shardwise.sharded.create import from_local_shards as init_from_local_shards
from shardwise.sharded.create import (
    from_local_shards_and_global_metadata as init_from_local_shards_and_global_metadata,
)
from shardwise.sharded.create import from_local_tensor as init_from_local_tensor
from shardwise.sharded.metadata import (
    MEM_FORMAT_ENCODING,
    Shard,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    narrow_tensor,
    narrow_tensor_by_index,
)
from shardwise.sharded.metadata import check_no_overlap as validate_non_overlapping_shards_metadata
from shardwise.sharded.methods import custom_sharded_op_impl, custom_sharding_spec_op
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
from shardwise.sharded.pickle import load_with_process_group
from shardwise.sharded.plan import Sharder, ShardingPlan, ShardingPlanner
from shardwise.sharded.specs import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardingSpec,
    get_chunked_dim_size,
    get_split_size,
)
from shardwise.sharded.tensor import ShardedTensor, to_dtensor

from_dtensor = ShardedTensor.from_dtensor

# torch's names of these functions.
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
