"""`torch.distributed.tensor.experimental`."""

from shardwise.api.local_map import local_map
from shardwise.dtensor.state import implicit_replication
from shardwise.parallel.context_parallel import context_parallel
from shardwise.rules.acceptable import register_sharding

__all__ = ["context_parallel", "implicit_replication", "local_map", "register_sharding"]
