"""Programs made by styles return on every rank what the original returns."""

import warnings
from collections import Counter

import pytest
import torch
from export_styles import CASES, called, collectives

import shardwise as sw
from shardwise.export import tensor_parallel_transformation


def outcome(name, decomposed, path):
    """How far the program of this rank is off when it is run twice, and its collectives."""
    case, here = CASES[name], sw.world.current()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.export
        program = case.exported()
        if decomposed:
            program = program.run_decompositions()
        local = tensor_parallel_transformation(program, here.rank, here.size, "cpu", case.styles)
        torch.export.save(local, f"{path}/{here.rank}.pt2")
        loaded = torch.export.load(f"{path}/{here.rank}.pt2")
    _, args, kwargs = case.made()
    for each in (local, loaded):
        torch.testing.assert_close(
            called(each.module(), args, kwargs), case.expected(), rtol=1e-4, atol=1e-5
        )
    return collectives(local)


SLOW = "the same Llama, dynamic"  # tests/multiprocess/test_export_gloo.py has one


@pytest.mark.parametrize("name", [name for name in CASES if name != SLOW])
def test_a_program_for_each_rank_returns_what_the_original_returns(workers4, name, tmp_path):
    for counted in workers4.run(outcome, name, False, tmp_path):
        assert counted == Counter(CASES[name].collectives)


@pytest.mark.parametrize(
    "name",
    [
        "attention by hand",
        "an embedding, tied",
        "a cache that is written to, keywords",
    ],
)
def test_a_decomposed_program_does_so_too(workers4, name, tmp_path):
    for counted in workers4.run(outcome, name, True, tmp_path):
        assert counted == Counter(CASES[name].collectives)
