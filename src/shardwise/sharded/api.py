"""The names of torch.distributed._shard.api."""

from shardwise.sharded import (
    ChunkShardingSpec,
    ShardedTensor,
    Sharder,
    ShardingPlan,
    ShardingSpec,
    load_with_process_group,
    shard_module,
    shard_parameter,
)
from shardwise.sharded import collect_local_shard as _collect_local_shard
from shardwise.sharded import reshard_output as _reshard_output
from shardwise.sharded import shard_tensor as _shard_tensor
from shardwise.sharded.pickle import current_process_group as _get_current_process_group

__all__ = [
    "ChunkShardingSpec",
    "ShardedTensor",
    "Sharder",
    "ShardingPlan",
    "ShardingSpec",
    "_collect_local_shard",
    "_get_current_process_group",
    "_reshard_output",
    "_shard_tensor",
    "load_with_process_group",
    "shard_module",
    "shard_parameter",
]
