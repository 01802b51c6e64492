"""Exported programs, one for each rank."""

from shardwise.export.errors import ExportError
from shardwise.export.program import shard_program
from shardwise.export.styles import tensor_parallel_transformation

__all__ = ["ExportError", "shard_program", "tensor_parallel_transformation"]
