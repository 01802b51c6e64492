"""The names of torch.distributed._shard.sharded_tensor."""

from shardwise.sharded import (
    Shard,
    ShardedTensor,
    ShardedTensorBase,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    custom_sharded_op_impl,
    empty,
    full,
    init_from_local_shards,
    ones,
    pre_load_state_dict_hook,
    rand,
    randn,
    state_dict_hook,
    zeros,
)
from shardwise.sharded import custom_sharded_op_impl as _sharded_op_impl

__all__ = [
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "TensorProperties",
    "_sharded_op_impl",
    "custom_sharded_op_impl",
    "empty",
    "full",
    "init_from_local_shards",
    "ones",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "state_dict_hook",
    "zeros",
]
