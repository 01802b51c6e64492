"""Programs made by styles return on every rank what the original returns."""

import warnings
from collections import Counter

import pytest
import torch
from support.export_styles import CASES, called, collectives

import shardwise as sw
from shardwise.core import world
from shardwise.export import shard_program, tensor_parallel_transformation
from shardwise.parallel import plans


def outcome(name, decomposed, path):
    """Return the greatest error of this rank's program in two runs, and its collectives."""
    case, here = CASES[name], world.current()
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


SLOW = "the same Llama, dynamic"  # tests/export/test_export_gloo.py has one


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", [name for name in CASES if name != SLOW])
def test_a_program_for_each_rank_returns_what_the_original_returns(workers4, name, tmp_path):
    for counted in workers4.run(outcome, name, False, tmp_path):
        assert counted == Counter(CASES[name].collectives)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "name",
    [
        "an embedding, tied",
        "a cache that is written to, keywords",
    ],
)
def test_a_decomposed_program_does_so_too(workers4, name, tmp_path):
    for counted in workers4.run(outcome, name, True, tmp_path):
        assert counted == Counter(CASES[name].collectives)


def ready_plan(kind, sequence_parallel):
    """Return the result of a Llama's program by a ready plan, and its collectives."""
    case, here = CASES["Llama, 2 layers, tied embeddings"], world.current()
    program = case.exported()
    if kind == "styles":
        styles = plans.llama_styles(sequence_parallel=sequence_parallel)
        local = tensor_parallel_transformation(program, here.rank, here.size, "cpu", styles)
    else:
        mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        plan = plans.llama("tp", data_axis="dp", sequence_parallel=sequence_parallel)
        local = shard_program(program, mesh, plan)
    _, args, kwargs = case.made()
    torch.testing.assert_close(
        called(local.module(), args, kwargs), case.expected(), rtol=1e-4, atol=1e-5
    )
    return collectives(local)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("kind, sequence_parallel", [("styles", True), ("plan", False)])
def test_the_ready_plans_for_a_llama_fit_its_program(workers4, kind, sequence_parallel):
    counted = workers4.run(ready_plan, kind, sequence_parallel)
    assert all(each == counted[0] for each in counted)
    if not sequence_parallel:
        assert counted[0]["all_reduce"] == 5  # two per layer, and the embedding's
