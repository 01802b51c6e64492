"""The exception of exported programs."""

from __future__ import annotations

from shardwise.errors import ShardwiseError


class ExportError(ShardwiseError, ValueError):
    """A program, a plan or a mesh that cannot be made into a program for each rank."""
