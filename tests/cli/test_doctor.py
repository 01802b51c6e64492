"""`shardwise doctor` says what is installed, and its self-test finds what does not work."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

import shardwise as sw
from shardwise import cli, torch_internals
from shardwise.cli import doctor


@dataclass
class Internal:
    path: str
    purpose: str
    problem: str | None


@pytest.fixture
def without_processes(monkeypatch):
    """The checks that take no time."""
    quick = {name: check for name, check in doctor.CHECKS.items() if "local processes" not in name}
    assert len(quick) == len(doctor.CHECKS) - 1
    monkeypatch.setattr(doctor, "CHECKS", quick)
    return quick


def lines(capsys):
    """The lines of the report, by their first word."""
    return [tuple(line.split(maxsplit=1)) for line in capsys.readouterr().out.splitlines()]


def test_the_report_names_versions_cpu_cores_and_backends(capsys):
    assert cli.main(["doctor"]) == 0
    told = dict(lines(capsys))
    assert told["shardwise"] == sw.__version__
    assert told["python"].startswith(platform.python_version())
    assert told["torch"].startswith(f"{torch.__version__} (tested: 2.13 to 2.15)")
    for package in ("numpy", "rich", "safetensors"):
        assert told[package] == importlib.metadata.version(package)
    assert set(told) >= {"cloudpickle", "matplotlib", "transformers", "accelerators"}
    assert told["cpu"].startswith(torch.backends.cpu.get_cpu_capability())
    assert " cores, " in told["cpu"]
    assert "gloo" in told["backends"].split(", ")
    assert "ok" not in told


def test_a_package_that_is_missing_is_said_to_be_and_what_it_is_for(capsys, monkeypatch):
    def version(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert cli.main(["doctor"]) == 0
    told = dict(lines(capsys))
    assert told["numpy"] == "MISSING, and required"
    assert told["matplotlib"] == "not installed (for the plot of the demo)"


def test_an_untested_version_of_torch_is_said_to_be_one(capsys, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.16.1")
    assert cli.main(["doctor"]) == 0
    told = dict(lines(capsys))["torch"]
    assert told == "2.16.1 (is newer than the tested versions, tested: 2.13 to 2.15)"


def test_the_self_test_says_ok_for_each_check_and_each_internal(
    capsys, monkeypatch, without_processes
):
    internals = [Internal("torch._C.one", "to count", None), Internal("torch._two", "to add", None)]
    monkeypatch.setattr(torch_internals, "report", lambda: internals)
    assert cli.main(["doctor", "--self-test"]) == 0
    told = lines(capsys)
    names = ["torch._C.one (to count)", "torch._two (to add)", *without_processes]
    assert [rest for first, rest in told if first == "ok"] == names
    assert told[-1] == ("everything", "works")


def test_an_internal_of_another_shape_fails_with_its_problem(
    capsys, monkeypatch, without_processes
):
    internals = [Internal("torch._C.one", "to count", "is not there")]
    monkeypatch.setattr(torch_internals, "report", lambda: internals)
    assert cli.main(["doctor", "--self-test"]) == 1
    told = lines(capsys)
    assert ("FAILED", "torch._C.one (to count): is not there") in told
    assert len([first for first, _ in told if first == "ok"]) == len(without_processes)
    assert told[-1] == ("1", "failed")


def test_a_check_that_raises_fails_with_the_reason_and_the_others_go_on(
    capsys, monkeypatch, without_processes
):
    def broken():
        raise sw.LaunchError("it is broken\nand this is how")

    monkeypatch.setattr(torch_internals, "report", list)
    monkeypatch.setitem(doctor.CHECKS, next(iter(doctor.CHECKS)), broken)
    assert cli.main(["doctor", "--self-test"]) == 1
    told = lines(capsys)
    assert [rest for first, rest in told if first == "FAILED"] == [
        f"{next(iter(doctor.CHECKS))}: LaunchError: it is broken"
    ]
    assert [rest for first, rest in told if first == "ok"] == list(without_processes)[1:]


@pytest.mark.parametrize("check", ["dispatch", "backward", "redistribution", "fsdp"])
def test_every_check_can_fail(check, monkeypatch):
    """Wrong values are found: here those of one process are."""
    (function,) = [each for name, each in doctor.CHECKS.items() if name.startswith(check)]
    function()
    equal = doctor._expect_equal
    monkeypatch.setattr(
        doctor, "_expect_equal", lambda got, expected: equal(got, expected * 1.01 + 0.01)
    )
    with pytest.raises(sw.RankError, match="not close"):
        function()


@pytest.mark.slow
def test_the_command_runs_its_self_test_in_a_process_of_its_own():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "shardwise", "doctor", "--self-test"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    for check in doctor.CHECKS:
        assert f"ok             {check}\n" in done.stdout
    assert done.stdout.endswith("everything works\n")
