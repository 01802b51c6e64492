"""Rules: how each operator relates the dims of its inputs and outputs."""

from shardwise.rules import matmul, pointwise

__all__ = ["matmul", "pointwise"]
