"""`torch.distributed.fsdp._fully_shard._fsdp_api`."""

from shardwise.fsdp.config import (
    AllGather,
    Comm,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReduceScatter,
)
from shardwise.fsdp.mesh_info import DataParallelMeshDims

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "Comm",
    "DataParallelMeshDims",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatter",
]
