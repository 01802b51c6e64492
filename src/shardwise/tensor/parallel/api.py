"""`torch.distributed.tensor.parallel.api`."""

from shardwise.parallel.parallelize import parallelize_module

__all__ = ["parallelize_module"]
