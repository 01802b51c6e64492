"""Tests of packages that are not installed are deselected, and the report names and counts them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import missing_packages

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
import pytest

def test_one():
    pass

@pytest.mark.needs("pytest")
def test_of_a_package_that_is_installed():
    pass

@pytest.mark.needs("no_such_package")
@pytest.mark.parametrize("case", range(3))
def test_of_a_package_that_is_not(case):
    raise AssertionError

@pytest.mark.needs("none_such")
def test_of_another():
    raise AssertionError
"""


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("processes", ["0", "2"])
def test_what_is_deselected_is_named_and_counted(processes, tmp_path):
    (tmp_path / "conftest.py").write_bytes(Path(missing_packages.__file__).read_bytes())
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", processes],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *_, last = done.stdout.splitlines()
    assert re.match(r"2 passed, 4 deselected in", last)
    said = (
        "DESELECTED [3] no_such_package is not installed:\n"
        "  [3] tests/test_it.py::test_of_a_package_that_is_not\n"
        "DESELECTED [1] none_such is not installed:\n"
        "  [1] tests/test_it.py::test_of_another\n"
    )
    assert said in done.stdout
