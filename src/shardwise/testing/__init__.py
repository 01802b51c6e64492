"""Tools to check a rule: `check_rule`, and what it is made of.

Rules are checked, not believed: an operator on DTensors is compared with the same operator in one
process, on every layout of its inputs.
"""

from shardwise.testing.inputs import (
    Sample,
    contribution,
    distributed,
    layouts_of,
    piece,
    whole_of,
)
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
