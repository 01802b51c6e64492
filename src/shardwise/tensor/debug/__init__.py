"""`torch.distributed.tensor.debug`."""

from shardwise.api.comm_debug import CommDebugMode
from shardwise.api.visualize import visualize_sharding

__all__ = ["CommDebugMode", "visualize_sharding"]
