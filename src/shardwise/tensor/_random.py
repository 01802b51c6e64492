"""`torch.distributed.tensor._random`."""

from shardwise.random.seed_check import manual_seed

__all__ = ["manual_seed"]
