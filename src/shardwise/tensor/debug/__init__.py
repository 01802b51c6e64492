"""`torch.distributed.tensor.debug`."""

from shardwise.tensor.debug._comm_mode import CommDebugMode
from shardwise.tensor.debug._visualize_sharding import visualize_sharding

__all__ = ["CommDebugMode", "visualize_sharding"]
