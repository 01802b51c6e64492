"""Tensor parallelism: torch's module styles, and plans that lay out a whole model."""

from shardwise.parallel.activations import Activations
from shardwise.parallel.input_reshard import input_reshard
from shardwise.parallel.parallelize import loss_parallel, parallelize_module, shard_module
from shardwise.parallel.plan_spec import PlanError
from shardwise.parallel.prepare import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from shardwise.parallel.projections import ColwiseParallel, RowwiseParallel, SequenceParallel
from shardwise.parallel.styles import ParallelStyle

__all__ = [
    "Activations",
    "ColwiseParallel",
    "ParallelStyle",
    "PlanError",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "input_reshard",
    "loss_parallel",
    "parallelize_module",
    "shard_module",
]
