"""`torch.distributed.tensor.experimental`."""

from shardwise.api.distribute import local_map

__all__ = ["local_map"]
