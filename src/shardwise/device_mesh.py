"""`torch.distributed.device_mesh`."""

from shardwise.core.mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
