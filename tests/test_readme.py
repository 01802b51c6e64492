"""What the README shows, runs, and prints what the README says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


EXAMPLES = list(zip(blocks("python"), blocks("text"), strict=True))


def test_there_are_examples():
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("program, printed", EXAMPLES)
def test_the_python_of_the_readme_runs_and_prints_what_it_says(program, printed, tmp_path):
    script = tmp_path / "readme.py"
    script.write_text(program)
    run = subprocess.run(
        [sys.executable, "-W", "error", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == printed


def test_every_make_target_the_readme_names_exists():
    makefile = (Path(__file__).resolve().parent.parent / "Makefile").read_text()
    named = set(re.findall(r"\bmake ([a-z]+)", README))
    assert {"demo", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
