"""The programs of the README and of the guides run, and print what the pages say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.demo.display import collective_rows, format_bytes
from shardwise.demo.options import check_options
from shardwise.demo.training import on_each_rank

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
FSDP = (ROOT / "docs" / "fsdp.md").read_text("utf-8")

PROGRAM = r"```python\n((?:(?!```).)*)```\n+```text\n(.*?)```"
"""A program, and below it what it prints. Other blocks of the guides are run by test_docs."""
GUIDES = (
    *("dtensor", "redistribute", "running", "parallel", "fsdp", "sharded", "export"),
    "other-code",
)
PAGES = ("README.md", *(f"docs/{guide}.md" for guide in GUIDES))
EXAMPLES = {
    page: re.findall(PROGRAM, (ROOT / page).read_text("utf-8"), re.DOTALL) for page in PAGES
}


def test_each_page_has_one_program():
    assert {page: len(found) for page, found in EXAMPLES.items()} == dict.fromkeys(PAGES, 1)


def test_the_readme_has_no_other_python_and_is_short():
    assert README.count("```python") == 1
    assert README.count("\n") <= 150


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("page", PAGES)
def test_the_program_of_a_page_runs_and_prints_what_the_page_says(page, tmp_path):
    ((program, printed),) = EXAMPLES[page]
    script = tmp_path / "readme.py"
    script.write_text(program, "utf-8")
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
    makefile = (ROOT / "Makefile").read_text("utf-8")
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert {"demo", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def in_words(events):
    """Such as `2 all-gathers (1.5 MB), 1 all-reduce (4 B)`, and the bytes of all."""
    found = collective_rows(events)
    kinds = {}
    for row in found:
        count, received = kinds.get(row.kind, (0, 0))
        kinds[row.kind] = count + row.count, received + row.bytes
    said = (
        f"{count} {kind}{'s' if count > 1 else ''} ({format_bytes(received)})"
        for kind, (count, received) in sorted(kinds.items())
    )
    return ", ".join(said), format_bytes(sum(row.bytes for row in found))


@pytest.mark.parametrize("mode", ["fsdp", "hsdp", "tp", "fsdp+tp"])
def test_the_table_of_modes_says_what_the_demo_hears(mode, tmp_path):
    options = check_options(mode=mode, steps=1, output=tmp_path)
    outcomes = sw.simulate(on_each_rank, options.ranks, options, tmp_path / "losses")
    collectives, received = in_words(outcomes[0].events)
    axes = "; ".join(f"{name}: {splits.value}" for name, splits in options.parallelism.axes.items())
    mesh = " x ".join(map(str, options.mesh))
    assert f"| `{mode}` | {mesh} | {axes} | {collectives} | {received} |\n" in FSDP
