"""The names of torch.distributed._shard.sharding_plan."""

from shardwise.sharded.plan import ShardingPlan, ShardingPlanner

__all__ = ["ShardingPlan", "ShardingPlanner"]
