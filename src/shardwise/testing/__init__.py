"""Tools to check the rule of an operator: `check_rule`, and its parts.

An operator on DTensors is compared with the same operator in one process, for all layouts of its
inputs.
"""

from shardwise.testing.inputs import Sample, contribution, distributed, layouts_of, piece, whole_of
from shardwise.testing.reference import (
    Reference,
    UnstableWarning,
    loss_of,
    value_difference,
    warn_of_unstable,
    widened,
)
from shardwise.testing.rule_check import Report, check_rule, missing_splits

__all__ = [
    "Reference",
    "Report",
    "Sample",
    "UnstableWarning",
    "check_rule",
    "contribution",
    "distributed",
    "layouts_of",
    "loss_of",
    "missing_splits",
    "piece",
    "value_difference",
    "warn_of_unstable",
    "whole_of",
    "widened",
]
