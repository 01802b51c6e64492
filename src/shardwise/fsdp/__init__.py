"""Data parallelism: parameters are sharded over ranks and gathered when needed, or replicated.

`fully_shard` and `replicate` change a module in place, with torch's names and arguments. Each rank
runs the module on its own part of a batch; gradients are averaged. Communication overlaps with
computation.
"""

from shardwise.fsdp.api import fully_shard, replicate, share_comm_ctx
from shardwise.fsdp.config import (
    AllGather,
    Comm,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReduceScatter,
)
from shardwise.fsdp.errors import (
    FSDPError,
    GatherError,
    ShardedState,
    StateError,
    TrainingState,
)
from shardwise.fsdp.mesh_info import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
)
from shardwise.fsdp.module import (
    FSDPModule,
    ReplicateModule,
    UnshardHandle,
    register_fsdp_forward_method,
)
from shardwise.fsdp.root import GradientReductionHandle

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "Comm",
    "DDPMeshInfo",
    "DataParallelMeshDims",
    "DataParallelMeshInfo",
    "FSDPError",
    "FSDPMeshInfo",
    "FSDPModule",
    "GatherError",
    "GradientReductionHandle",
    "HSDPMeshInfo",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatter",
    "ReplicateModule",
    "ShardPlacementResult",
    "ShardedState",
    "StateError",
    "TrainingState",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
]
