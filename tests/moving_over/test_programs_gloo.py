"""Programs written for torch, rewritten by `shardwise migrate`, give what one process gives.

Each file in `programs` is one program, written anew after the public behaviour of torch's examples
(`example_`) and of torchtitan (`titan_`). It runs on two and on four ranks: as it is, with torch,
and rewritten. Those named `trap_` are programs with which torch fails.
"""

import subprocess
import sys

import pytest
from support.moving_over import FOLDER, PROGRAMS, expected_runs, run_program, write_program
from support.ranks import Pool

from shardwise.cli import migrate

TORCH_FAILS = {
    "trap_clip_meshes": "gradients on two meshes are not clipped in one call: a RuntimeError",
    "trap_divide_factor": "with one rank for each shard the factor divides twice",
    "trap_uneven_units": "pieces of uneven units are taken for even ones: a RuntimeError",
}
"""Programs with which torch fails, and how."""

QUICK = ("example_fsdp_tp", "example_pipeline", "titan_trainer", "titan_world_mesh")
"""Each takes about two seconds."""

SIZES = (2, 4)


@pytest.fixture(scope="module")
def two_ranks():
    """Return the pool of two ranks, which are started when they are first needed."""
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture
def ranks_of(two_ranks, workers4):
    """Return the function that returns the workers of each number of ranks."""
    return lambda size: workers4 if size == 4 else two_ranks.get()


@pytest.mark.parametrize(
    "name, ranks",
    [
        pytest.param(name, ranks, marks=() if name in QUICK and ranks == 4 else pytest.mark.slow)
        for name in PROGRAMS
        for ranks in SIZES
    ],
)
def test_a_rewritten_program_gives_what_one_process_gives(name, ranks, ranks_of, tmp_path):
    run_program(name, "shardwise", ranks_of, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.xfail(reason=TORCH_FAILS[name], raises=AssertionError, strict=True),
        )
        if name in TORCH_FAILS
        else name
        for name in PROGRAMS
    ],
)
def test_torch_gives_what_one_process_gives(name, ranks, ranks_of, tmp_path):
    run_program(name, "torch", ranks_of, ranks, tmp_path)


@pytest.mark.slow
def test_a_rewritten_program_runs_as_a_script_under_torchrun(tmp_path):
    path = write_program("example_tensor_parallel", "shardwise", tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ran = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", path],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    (expected,) = expected_runs(path.stem, 2)
    assert ran.stdout.count(str(expected["losses"])) == 2


@pytest.mark.parametrize("name", PROGRAMS)
def test_only_imports_and_names_of_torch_change(name, tmp_path):
    new = write_program(name, "shardwise", tmp_path).read_text()
    old = (FOLDER / f"{name}.py").read_text()
    changed = [
        line
        for line in set(new.splitlines()) - set(old.splitlines())
        if not line.lstrip().startswith(("from shardwise", "import shardwise"))
    ]
    assert all("shardwise." in line for line in changed)
    assert migrate.run([str(tmp_path)], write=True) == migrate.DONE
    assert (tmp_path / f"{name}.py").read_text() == new
