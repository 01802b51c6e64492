"""`torch.distributed.fsdp._fully_shard`."""

from shardwise.fsdp.api import fully_shard, share_comm_ctx
from shardwise.fsdp.config import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardwise.fsdp.mesh_info import DataParallelMeshDims
from shardwise.fsdp.module import FSDPModule, UnshardHandle, register_fsdp_forward_method
from shardwise.fsdp.root import GradientReductionHandle

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
