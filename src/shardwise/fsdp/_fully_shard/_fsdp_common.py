"""`torch.distributed.fsdp._fully_shard._fsdp_common`."""

from shardwise.fsdp.errors import TrainingState
from shardwise.fsdp.mesh_info import (
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
    resolve_shard_placement,
)

__all__ = [
    "DDPMeshInfo",
    "DataParallelMeshInfo",
    "FSDPMeshInfo",
    "HSDPMeshInfo",
    "ShardPlacementResult",
    "TrainingState",
    "resolve_shard_placement",
]
