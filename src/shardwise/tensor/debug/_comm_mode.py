"""`torch.distributed.tensor.debug._comm_mode`."""

from shardwise.api.comm_debug import CommDebugMode

__all__ = ["CommDebugMode"]
