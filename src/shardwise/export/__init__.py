"""Exported programs, one for each rank."""

from shardwise.export.errors import ExportError
from shardwise.export.program import shard_program

__all__ = ["ExportError", "shard_program"]
