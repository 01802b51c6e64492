"""The names of torch.distributed._shard.sharding_plan.api."""

from shardwise.sharded import Sharder, ShardingPlan, ShardingPlanner, ShardingSpec

__all__ = ["Sharder", "ShardingPlan", "ShardingPlanner", "ShardingSpec"]
