"""Data parallelism: parameters split over ranks, gathered while they are needed; or whole on each.

`fully_shard` and `replicate` change a module in place, with torch's names and arguments. Each rank
runs the module on its own part of a batch; gradients are averaged. What travels does so while the
rest computes.
"""

from shardwise.fsdp.api import fully_shard, replicate, share_comm_ctx
from shardwise.fsdp.custom import AllGather, Comm, ReduceScatter
from shardwise.fsdp.errors import FSDPError, GatherError, StateError
from shardwise.fsdp.finalizing import GradientReductionHandle
from shardwise.fsdp.mesh_info import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
)
from shardwise.fsdp.module import FSDPModule, UnshardHandle, register_fsdp_forward_method
from shardwise.fsdp.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardwise.fsdp.states import ShardedState, TrainingState

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
    "ShardedState",
    "StateError",
    "TrainingState",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
]
