"""`torch.distributed.tensor.experimental._func_map`."""

from shardwise.api.local_map import local_map

__all__ = ["local_map"]
