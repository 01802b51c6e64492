"""Exported programs, one for each rank."""

from shardwise.export.errors import ExportError
from shardwise.export.program import shard_program
from shardwise.export.showing import print_sharding, sharding_text
from shardwise.export.styles import tensor_parallel_transformation

__all__ = [
    "ExportError",
    "print_sharding",
    "shard_program",
    "sharding_text",
    "tensor_parallel_transformation",
]
