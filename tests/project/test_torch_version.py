"""Versions of torch that shardwise is not tested with are warned about, once and in time."""

import multiprocessing
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.core.torch_version import (
    NEWEST_TESTED,
    OLDEST_TESTED,
    untested_because,
    warn_if_untested,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "version",
    ["2.13.0", "2.13.0+cpu", "2.13.1", "2.14.1+cu130", "2.15.0", "2.15.0rc3", "2.15.7+git1a2b3c4"],
)
def test_releases_and_candidates_of_the_tested_minor_versions_are_tested(version):
    assert untested_because(version) is None


@pytest.mark.parametrize(
    "version, reason",
    [
        ("1.13.1", "older"),
        ("2.9.0", "older"),
        ("2.12.1+cpu", "older"),
        ("2.16.0", "newer"),
        ("2.16.0rc1", "newer"),
        ("2.16.0.dev20270101+cpu", "newer"),
        ("3.0", "newer"),
        ("2.100.0", "newer"),
        ("2.15.0.dev20260801", "development build"),
        ("2.15.0a0+git1a2b3c4", "development build"),
        ("2.13.0a0+5bf96a1.nv26.5", "development build"),
        ("main", "cannot be compared"),
        ("", "cannot be compared"),
    ],
)
def test_others_are_not(version, reason):
    assert reason in untested_because(version)


def run(program, version, *flags, **environment):
    """What a new process prints that runs a program with a torch of this version."""
    fake = f"import torch\ntorch.__version__ = {version!r}\n"
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("SHARDWISE_TORCH_VERSION_CHECK", "LOCAL_RANK", "PYTHONWARNINGS")
    }
    return subprocess.run(
        [sys.executable, *flags, "-c", fake + program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=inherited | environment,
    )


def test_an_untested_version_warns_once_and_says_what_is_tested_and_how_to_silence_it():
    done = run("import shardwise\nimport shardwise.fsdp, shardwise.export", "2.16.1+cpu")
    assert done.returncode == 0
    assert done.stderr.count("Warning") == 1
    said = "TorchVersionWarning: torch 2.16.1+cpu is newer than the tested versions: "
    assert f"<string>:3: {said}shardwise is tested with torch 2.13 to 2.15" in done.stderr
    assert "SHARDWISE_TORCH_VERSION_CHECK=0" in done.stderr


def test_a_tested_version_does_not_warn():
    assert run("import shardwise", "2.14.0+cpu").stderr == ""


def test_the_warning_comes_before_anything_of_torch_is_changed():
    program = """
watched = torch.Tensor, torch.autograd.Function, torch.nn.Module
before = [dict(vars(each)) for each in watched]
try:
    import shardwise
except UserWarning as warning:
    import sys
    loaded = [name for name in sys.modules if name.startswith("shardwise")]
    print(type(warning).__name__, sorted(loaded))
    assert [dict(vars(each)) for each in watched] == before
"""
    done = run(program, "2.16.0", "-W", "error::UserWarning")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "TorchVersionWarning ['shardwise.core', 'shardwise.core.errors']\n"


@pytest.mark.slow
def test_the_ways_to_silence_it_that_the_warning_names_do():
    assert run("import shardwise", "2.16.0", SHARDWISE_TORCH_VERSION_CHECK="0").stderr == ""
    warning = run("import shardwise", "2.16.0").stderr
    call = re.search(r"warnings\.filterwarnings\(.*?\)", warning)[0]
    assert run(f"import warnings\n{call}\nimport shardwise", "2.16.0").stderr == ""


@pytest.mark.slow
def test_one_rank_of_a_host_speaks_for_all():
    assert run("import shardwise", "2.16.0", LOCAL_RANK="1").stderr == ""
    assert "TorchVersionWarning" in run("import shardwise", "2.16.0", LOCAL_RANK="0").stderr


def test_processes_that_python_started_are_silent(monkeypatch):
    monkeypatch.delenv("SHARDWISE_TORCH_VERSION_CHECK", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    with pytest.warns(sw.TorchVersionWarning):
        warn_if_untested()
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    warn_if_untested()  # warnings are errors here


def test_it_is_a_user_warning_under_a_public_name():
    assert issubclass(sw.TorchVersionWarning, UserWarning)
    assert "TorchVersionWarning" in sw.__all__


def test_requirements_and_constraints_name_the_same_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (oldest, newest) = OLDEST_TESTED, NEWEST_TESTED
    required = f"torch>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"
    assert required in project["dependencies"]
    pinned = {
        tuple(map(int, path.stem.split(".")[:2]))
        for path in (ROOT / "constraints").glob("[0-9]*.txt")
    }
    assert pinned == {(2, minor) for minor in range(oldest[1], newest[1] + 1)}
    for path in (ROOT / "constraints").glob("[0-9]*.txt"):
        assert path.read_text("utf-8").endswith(f"--constraint shared.txt\ntorch=={path.stem}\n")
