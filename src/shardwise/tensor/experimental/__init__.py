"""`torch.distributed.tensor.experimental`."""

from shardwise.api.distribute import local_map
from shardwise.rules.acceptable import register_sharding

__all__ = ["local_map", "register_sharding"]
