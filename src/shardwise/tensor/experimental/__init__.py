"""`torch.distributed.tensor.experimental`."""

from shardwise.dtensor.state import implicit_replication
from shardwise.tensor.experimental._attention import context_parallel
from shardwise.tensor.experimental._func_map import local_map
from shardwise.tensor.experimental._register_sharding import register_sharding

__all__ = ["context_parallel", "implicit_replication", "local_map", "register_sharding"]
