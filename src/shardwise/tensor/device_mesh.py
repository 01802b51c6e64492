"""`torch.distributed.tensor.device_mesh`."""

from shardwise.core.mesh import DeviceMesh, _mesh_resources, init_device_mesh

__all__ = ["DeviceMesh", "_mesh_resources", "init_device_mesh"]
