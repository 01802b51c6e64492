"""`torch.distributed.tensor.debug._visualize_sharding`."""

from shardwise.api.visualize import visualize_sharding

__all__ = ["visualize_sharding"]
