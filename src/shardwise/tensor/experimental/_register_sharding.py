"""`torch.distributed.tensor.experimental._register_sharding`."""

from shardwise.rules.acceptable import register_sharding

__all__ = ["register_sharding"]
