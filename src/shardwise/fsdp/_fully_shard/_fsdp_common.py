"""`torch.distributed.fsdp._fully_shard._fsdp_common`."""

from shardwise.fsdp.errors import TrainingState
from shardwise.fsdp.mesh_info import (
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
)

__all__ = [
    "DDPMeshInfo",
    "DataParallelMeshInfo",
    "FSDPMeshInfo",
    "HSDPMeshInfo",
    "TrainingState",
]
