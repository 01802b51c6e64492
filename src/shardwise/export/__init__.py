"""Exported programs, one for each rank."""

from shardwise.core.errors import ExportError
from shardwise.export.print import print_sharding, sharding_text
from shardwise.export.program import shard_program
from shardwise.export.recording import make_groups
from shardwise.export.step import ShardedStep, shard_step
from shardwise.export.styles import tensor_parallel_transformation

__all__ = [
    "ExportError",
    "ShardedStep",
    "make_groups",
    "print_sharding",
    "shard_program",
    "shard_step",
    "sharding_text",
    "tensor_parallel_transformation",
]
