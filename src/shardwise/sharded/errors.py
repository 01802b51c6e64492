"""The exceptions of sharded tensors."""

from __future__ import annotations

from shardwise.core.errors import ShardwiseError


class ShardedTensorError(ShardwiseError, ValueError):
    """Shards, specs or arguments that do not form a tensor, or an operator that the shards do not
    allow."""


class ShardedStateError(ShardwiseError, RuntimeError):
    """Missing or wrong surroundings of a tensor: process groups, RPC, a saved state."""
