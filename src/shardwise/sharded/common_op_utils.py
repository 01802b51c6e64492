"""The names of torch.distributed._shard.common_op_utils."""

from shardwise.sharded.torch_helpers import basic_validation as _basic_validation
from shardwise.sharded.torch_helpers import register_default_op as _register_default_op

__all__ = ["_basic_validation", "_register_default_op"]
