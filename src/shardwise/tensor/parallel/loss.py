"""`torch.distributed.tensor.parallel.loss`."""

from shardwise.parallel.parallelize import loss_parallel

__all__ = ["loss_parallel"]
