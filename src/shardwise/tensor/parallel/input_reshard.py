"""`torch.distributed.tensor.parallel.input_reshard`."""

from shardwise.parallel import input_reshard

__all__ = ["input_reshard"]
