"""The names of torch.distributed._shard.op_registry_utils."""

from shardwise.sharded.torch_helpers import basic_validation as _basic_validation
from shardwise.sharded.torch_helpers import decorator_func as _decorator_func
from shardwise.sharded.torch_helpers import register_op as _register_op

__all__ = ["_basic_validation", "_decorator_func", "_register_op"]
