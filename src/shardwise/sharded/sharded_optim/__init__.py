"""The names of torch.distributed._shard.sharded_optim."""

from shardwise.sharded import ShardedOptimizer, ShardedTensor, named_params_with_sharded_tensor

__all__ = ["ShardedOptimizer", "ShardedTensor", "named_params_with_sharded_tensor"]
