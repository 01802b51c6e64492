"""`torch.distributed.fsdp._fully_shard._fsdp_state`."""

from shardwise.fsdp.param_group import ParamGroup as FSDPState
from shardwise.fsdp.param_group import module_state as _get_module_fsdp_state

__all__ = ["FSDPState", "_get_module_fsdp_state"]
