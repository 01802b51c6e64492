"""Programs that torch 2.13's ShardedTensor gets wrong, on simulated ranks.

tests/sharded/test_sharded_gloo.py runs the same programs on real ones, and shows that torch
still gets them wrong.
"""

import pytest
from support import sharded_traps as cases

import shardwise as sw


@pytest.mark.parametrize("trap", cases.TRAPS, ids=lambda trap: trap.__name__)
def test_shardwise_is_right(trap):
    lib = cases.shardwise(lambda ranks: sw.DeviceMesh("cpu", ranks))
    sw.simulate(trap, cases.RANKS, lib)
