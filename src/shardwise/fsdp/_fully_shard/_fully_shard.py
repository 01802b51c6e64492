"""`torch.distributed.fsdp._fully_shard._fully_shard`."""

from shardwise.fsdp.api import fully_shard, share_comm_ctx
from shardwise.fsdp.module import (
    FSDPModule,
    UnshardHandle,
    disable_fsdp_module_new_init,
    get_cls_to_fsdp_cls,
    register_fsdp_forward_method,
)
from shardwise.fsdp.param_group import module_state as _get_module_fsdp_state
from shardwise.fsdp.root import GradientReductionHandle

__all__ = [
    "FSDPModule",
    "GradientReductionHandle",
    "UnshardHandle",
    "_get_module_fsdp_state",
    "disable_fsdp_module_new_init",
    "fully_shard",
    "get_cls_to_fsdp_cls",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
