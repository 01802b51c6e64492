"""`torch.distributed.tensor.experimental._tp_transform`."""

from shardwise.export.styles import tensor_parallel_transformation

__all__ = ["tensor_parallel_transformation"]
