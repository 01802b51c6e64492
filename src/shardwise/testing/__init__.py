"""Tools to check a rule: `check_rule`, and what it is made of.

Rules are checked, not believed: an operator on DTensors is compared with the same operator in one
process, on every layout of its inputs.
"""

from shardwise.testing.checking import Report, check_rule
from shardwise.testing.comparing import UnstableWarning, value_difference, warn_of_unstable, widened
from shardwise.testing.layouts import (
    contribution,
    distributed,
    layouts_of,
    piece,
    whole_of,
)
from shardwise.testing.legal import missing_splits
from shardwise.testing.reference import Reference, loss_of
from shardwise.testing.sample import Sample

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
