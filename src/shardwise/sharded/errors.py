"""The exceptions of sharded tensors."""

from __future__ import annotations

from shardwise.errors import ShardwiseError


class ShardedTensorError(ShardwiseError, ValueError):
    """Shards, specs or arguments that do not make one tensor, or an operator that they do not
    allow."""


class ShardedStateError(ShardwiseError, RuntimeError):
    """Something around the tensor is not as it must be: process groups, RPC, a saved state."""
