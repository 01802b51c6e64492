"""`torch.distributed.fsdp._fully_shard._fsdp_param_group`."""

from shardwise.fsdp.param_group import ParamGroup as FSDPParamGroup

__all__ = ["FSDPParamGroup"]
