"""Programs written for torch run after `shardwise migrate --write`, and give what one process gives.

Each file in `programs` is one program, written anew after the public behaviour of torch's examples
and of torchtitan. It runs on two and on four ranks, as it is and rewritten.
"""

import pytest
import torch
from support.moving_over import PROGRAMS, run_program

import shardwise as sw

TORCH_FAILS = {
    "trap_uneven_units": "torch takes the pieces of uneven units as even: a RuntimeError about shapes",
    "trap_divide_factor": "torch divides twice by the factor if one rank holds each shard",
    "trap_clip_meshes": "torch does not clip gradients of two meshes in one call: a RuntimeError",
}
"""Programs with which torch 2.13 fails, and how."""

QUICK = {
    "example_fsdp_tp",
    "example_pipeline",
    "titan_trainer",
    "titan_world_mesh",
    "trap_uneven_units",
}


@pytest.fixture(scope="module")
def two_ranks():
    with sw.Workers(2, timeout=180) as workers:
        yield workers


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS
     if "checkpoint" not in name],
)  # fmt: skip
def test_a_rewritten_program_gives_what_one_process_gives(name, workers4, tmp_path):
    run_program(name, "shardwise", 4, lambda size: workers4, tmp_path)
