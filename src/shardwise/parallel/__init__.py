"""Tensor parallelism: torch's module styles, and plans that lay out a whole model."""

from shardwise.parallel.activations import Activations
from shardwise.parallel.names import PlanError
from shardwise.parallel.sharding import shard_module

__all__ = ["Activations", "PlanError", "shard_module"]
