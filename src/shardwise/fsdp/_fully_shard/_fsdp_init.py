"""`torch.distributed.fsdp._fully_shard._fsdp_init`."""

from shardwise.fsdp.mesh_info import mesh_info_of as _get_mesh_info

__all__ = ["_get_mesh_info"]
