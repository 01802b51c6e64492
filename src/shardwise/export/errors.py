"""The exception of `shardwise.export`; plans raise `shardwise.parallel.PlanError` too."""

from __future__ import annotations

from shardwise.core.errors import ShardwiseError


class ExportError(ShardwiseError, ValueError):
    """A program, plan or mesh from which no rank's program can be made."""
