"""`torch.distributed.tensor.experimental._context_parallel._attention`."""

from shardwise.parallel.context_parallel import ContextParallel as _ContextParallel
from shardwise.parallel.context_parallel import (
    context_parallel,
    context_parallel_unshard,
)
from shardwise.parallel.context_parallel import context_parallel_shard as _context_parallel_shard
from shardwise.parallel.context_parallel import (
    disable_context_parallel_dispatcher as _disable_context_parallel_dispatcher,
)
from shardwise.parallel.context_parallel import (
    enable_context_parallel_dispatcher as _enable_context_parallel_dispatcher,
)
from shardwise.parallel.sequence_split import RotateMethod as _RotateMethod
from shardwise.parallel.sequence_split import options as _cp_options
from shardwise.parallel.sequence_split import set_rotate_method

__all__ = [
    "_ContextParallel",
    "_RotateMethod",
    "_context_parallel_shard",
    "_cp_options",
    "_disable_context_parallel_dispatcher",
    "_enable_context_parallel_dispatcher",
    "context_parallel",
    "context_parallel_unshard",
    "set_rotate_method",
]
