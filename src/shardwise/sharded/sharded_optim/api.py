"""The names of torch.distributed._shard.sharded_optim.api."""

from shardwise.sharded import ShardedOptimizer, ShardedTensor

__all__ = ["ShardedOptimizer", "ShardedTensor"]
