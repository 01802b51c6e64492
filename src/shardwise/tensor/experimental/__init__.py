"""`torch.distributed.tensor.experimental`."""

from shardwise.api.distribute import local_map
from shardwise.dtensor.state import implicit_replication
from shardwise.rules.acceptable import register_sharding

__all__ = ["implicit_replication", "local_map", "register_sharding"]
