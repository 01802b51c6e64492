"""Run the programs of tests/moving_over as they are, with torch, and rewritten for shardwise."""

import importlib.util
import inspect
import shutil
import traceback
import warnings
from pathlib import Path

import torch

from shardwise.cli import migrate

FOLDER = Path(__file__).parents[1] / "moving_over" / "programs"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py"))


def load(path):
    """Import a program from its file."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_program(name, library, folder):
    """Put a program into a folder, as it is or rewritten for shardwise; return its path."""
    path = Path(folder, f"{name}.py")
    shutil.copy(FOLDER / path.name, path)
    if library == "shardwise":
        assert migrate.run([str(path)], write=True) == migrate.DONE
    return path


def run_here(path, folder, library):
    """Run a program on a rank; return its results, or the traceback of its error.

    The ranks stay for the next program: an error that all of them raise must not end them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if library == "torch" else "error")
        try:
            results = load(path).run(str(folder))
        except Exception:
            return traceback.format_exc()
    return {name: value.detach() for name, value in results.items()}


def check(results, expected):
    """Compare the results of each rank with those of one process."""
    for rank, result in enumerate(results):
        assert not isinstance(result, str), f"rank {rank} raised an error:\n{result}"
        assert result.keys() == expected.keys()
        for name, value in result.items():
            assert type(value) is torch.Tensor, f"rank {rank}, {name}: {type(value).__name__}"
            tolerance = 0.05 if name.startswith("rough") else 1e-4
            torch.testing.assert_close(
                value,
                expected[name].detach(),
                rtol=tolerance,
                atol=tolerance / 10,
                msg=lambda text, name=name, rank=rank: f"rank {rank}, {name}: {text}",
            )


def expected_runs(name, ranks):
    """Return what each run of a program gives in one process: most are run once.

    The number of ranks may only choose what is run, never the result.
    """
    alone = load(FOLDER / f"{name}.py").alone
    expected = alone(ranks) if inspect.signature(alone).parameters else alone()
    return expected if isinstance(expected, list) else [expected]


def run_program(name, library, workers_of, ranks, folder):
    """Run a program as often as it says; compare each run with one process.

    A program of several runs goes on where the one before ended, on another number of ranks.

    Arguments:
        library: "torch", or "shardwise" for the rewritten program.
        workers_of: returns the workers of a number of ranks.
        ranks: how many ranks the first run has; two or four.
    """
    sources = Path(folder, library)
    sources.mkdir()
    path = write_program(name, library, sources)
    for number, expected in enumerate(expected_runs(name, ranks)):
        workers = workers_of(ranks if number % 2 == 0 else 6 - ranks)
        check(workers.run(run_here, str(path), str(folder), library), expected)
