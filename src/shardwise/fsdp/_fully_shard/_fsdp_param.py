"""`torch.distributed.fsdp._fully_shard._fsdp_param`."""

from shardwise.fsdp.errors import ShardedState
from shardwise.fsdp.param import ShardedParam as FSDPParam

__all__ = ["FSDPParam", "ShardedState"]
