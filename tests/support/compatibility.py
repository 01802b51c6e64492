"""Run everything with each supported version of torch, and write docs/compatibility.md.

`make compatibility` runs this, with Python's own library only: each version of torch is in an
environment of its own, which `make ... TORCH=version` sets up. ONLY=2.15.0 runs one version and
changes its row of the page alone.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
VERSIONS = sorted(path.stem for path in (ROOT / "constraints").glob("[0-9]*.txt"))


@dataclass(frozen=True)
class Difference:
    """Something that differs between versions of torch.

    Arguments:
        versions: the versions of torch, as users write them: "2.13", "2.14 and newer".
        what: what a user or a reader of the tests notices.
        why: the reason in torch, and what shardwise does about it.
    """

    versions: str
    what: str
    why: str


DIFFERENCES: list[Difference] = [
    Difference(
        "2.14 and newer",
        "`make lint` runs mypy without `warn_unused_ignores`.",
        "torch annotates more of its functions since 2.14. So 14 `type: ignore` comments, which "
        "the annotations of 2.13 need, ignore nothing.",
    ),
    Difference(
        "2.14 and newer",
        "`torch.linalg.polar` and `torch.linalg.matrix_sqrth` have rules; `torch.cholesky` and "
        "`torch.qr` are in `op_db` before 2.14 only.",
        "torch 2.14 added the first two and removed the operators of the others from aten. Rules "
        "of torch.linalg are registered by qualified name, so `torch.linalg.polar` does not get "
        "the rule of `torch.polar`.",
    ),
    Difference(
        "2.13",
        "Second derivatives of `cdist` and `pdist` raise, as in one process.",
        "torch implements them since 2.14.",
    ),
    Difference(
        "2.13",
        "The tests show three more defects of torch's DTensor: cross-entropy with weights, and "
        "with ignored targets, is wrong on a split batch; redistribution to Partial is refused.",
        "torch fixed them in 2.14. All other defects that the tests show are in 2.15 too.",
    ),
    Difference(
        "2.14 and newer",
        "`torch.autograd.Function.apply`, which shardwise guards, is implemented in C.",
        "The guard reads it as a descriptor from the class, which works for both kinds.",
    ),
    Difference(
        "2.14 and newer",
        "`program.run_decompositions()` of torch may warn that it erases a node twice.",
        "This happens for a buffer that is both written and returned; the program is right.",
    ),
    Difference(
        "2.15",
        "An exported program with attention of three dims and dropout draws a mask of four dims.",
        "torch's operator adds a dim of size 1. The numbers drawn are the same as in one process.",
    ),
    Difference(
        "before 2.15",
        "`finalize_backward`, `set_keep_unsharded_storage`, `param_dtype_override_fn`, `logspace`, "
        "`DeviceMesh.abort` and `reduce_dtype=None` work in shardwise as in torch 2.15; tests "
        "compare them with one process instead of with torch.",
        "torch has these names, and this meaning of `reduce_dtype=None`, since 2.15.",
    ),
    Difference(
        "before 2.15",
        "Setting `grad_dtype` to the parameter's own dtype counts as not setting it. If another "
        "dtype was set before, `model.to()` restores that one.",
        "torch cannot tell the two cases apart.",
    ),
]
"""Add what differs here: the page shows it in this order."""


# ---- the steps, each of which says what goes into its cell

STEPS = ("lint", "import", "self-test", "README", "demo")
COUNTS = ("passed", "failed", "xfailed", "skipped", "deselected")

Row = Mapping[str, str]
"""The cells of a version, by the heads of their columns."""


def python_of(version: str) -> Path:
    """Return the interpreter of a version's environment, as the Makefile names it."""
    default = re.search(r"^DEFAULT_TORCH := (.+)$", (ROOT / "Makefile").read_text("utf-8"), re.M)
    assert default is not None
    folder = ".venv" if version == default[1] else f".venv-{version}"
    return ROOT / folder / "bin" / "python"


def run(*command: str | Path) -> tuple[bool, str]:
    """Run a command and show its output; return whether it succeeded, and the output."""
    print("$", *command, flush=True)
    # The make that runs this would hand its own variables down.
    inherited = {name: each for name, each in os.environ.items() if not name.startswith("MAKE")}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=inherited | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    return process.wait() == 0, "".join(lines)


def in_words(is_right: bool) -> str:
    return "ok" if is_right else "**fails**"


def outcome_of(version: str, selection: str) -> Row:
    """Run every step with a version of torch; return its row of the table."""
    python, make = python_of(version), ("make", "--no-print-directory", f"TORCH={version}")
    row = {"torch": version}
    row["lint"] = in_words(run(*make, "lint")[0])
    installed = f"import torch; assert torch.__version__.partition('+')[0] == '{version}'"
    row["import"] = in_words(run(python, "-W", "error", "-c", f"import shardwise; {installed}")[0])
    row["self-test"] = in_words(run(python, "-m", "shardwise", "doctor", "--self-test")[0])
    row["README"] = in_words(run(python, "-m", "pytest", "-q", "tests/project/test_readme.py")[0])
    with tempfile.TemporaryDirectory() as folder:
        short = ("--model", "tiny", "--steps", "4", "--output", folder)
        row["demo"] = in_words(run(python, "-m", "shardwise", "demo", *short)[0])
    _, printed = run(*make, "test-all", f"ARGS=-q {selection}".rstrip())
    return row | counts(printed)


def counts(printed: str) -> dict[str, str]:
    """Return the numbers of pytest's last line, such as `3 failed, 20 passed in 1.23s`."""
    summaries = re.findall(r"^=*\s*(\d+ \w+(?:, \d+ \w+)*) in [\d.]+s.*$", printed, re.M)
    if not summaries:
        return dict.fromkeys(COUNTS, "?")
    found = {kind: int(count) for count, kind in re.findall(r"(\d+) (\w+)", summaries[-1])}
    failed = sum(found.get(kind, 0) for kind in ("failed", "error", "errors"))
    return {kind: str(found.get(kind, 0)) for kind in COUNTS} | {"failed": str(failed)}


def is_right(row: Row) -> bool:
    return all(row[step] == "ok" for step in STEPS) and row["failed"] == "0"


# ---- the page

HEADS = ("torch", *STEPS, *COUNTS)
TITLE = """# Versions of torch

shardwise supports torch 2.13, 2.14 and 2.15. With any other version it warns at import
(`TorchVersionWarning`). If a private name of torch that it uses is missing or has other parameters,
the import fails with an error that names it.

## Choose a version

`pip install .` accepts any supported torch. The targets of the Makefile use torch 2.13.0, in the
environment `.venv`. `TORCH=` chooses another version, in an environment of its own:

```sh
make test TORCH=2.15.0                # in .venv-2.15.0, which is set up on first use
make help                             # lists the versions and targets
make compatibility                    # runs everything with each version and writes this page
make compatibility ONLY="2.15.0"      # one version
```

`shardwise doctor` prints what is installed: put its output into a bug report. With `--self-test` it
checks in about ten seconds that shardwise works here: the internals of torch that it uses,
operators, gradients, moves, FSDP, and local processes.

## Results

For each version `make compatibility` runs `make lint`, imports shardwise in a new process with
warnings as errors, and runs `shardwise doctor --self-test`, the programs of the README and of the
guides, a short `shardwise demo`, and `make test-all`. The last columns count the tests. *xfailed*:
defects of torch's own DTensor, tensor parallelism and ShardedTensor that shardwise does not have; a
test shows each of them. *skipped*: tests that need what the machine lacks, such as network
namespaces. *deselected*: tests of packages that are not installed.
"""


def rows_of(page: str) -> dict[str, Row]:
    """Return the rows of a page, by version."""
    lines = re.findall(r"^\| (\d+\.\d+\.\d+ \|.*) \|$", page, re.M)
    rows = (dict(zip(HEADS, line.split(" | "), strict=True)) for line in lines)
    return {row["torch"]: row for row in rows}


def page_of(rows: Mapping[str, Row]) -> str:
    return "\n".join([TITLE, *table(HEADS, rows.values()), "", *differences(), ""])


def differences() -> Iterator[str]:
    yield "## Differences between versions"
    yield ""
    heads = ("with torch", "what", "why")
    cells = ((each.versions, each.what, each.why) for each in DIFFERENCES)
    yield from table(heads, (dict(zip(heads, row, strict=True)) for row in cells))


def table(heads: tuple[str, ...], rows: Iterable[Row]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield f"| {' | '.join(row[head] for head in heads)} |"


def main() -> int:
    """Run the chosen versions; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("only", nargs="*", help=f"versions, of {', '.join(VERSIONS)} (all)")
    parser.add_argument(
        "--tests", default="", help="arguments for pytest, to try this out: writes no page"
    )
    parser.add_argument(
        "--page", action="store_true", help="run nothing, write the page again with its results"
    )
    options = parser.parse_args()
    if unknown := set(options.only) - set(VERSIONS):
        parser.error(f"expected versions of {', '.join(VERSIONS)}; got {', '.join(unknown)}")
    rows = rows_of(PAGE.read_text("utf-8")) if PAGE.exists() else {}
    chosen = [] if options.page else options.only or VERSIONS
    for version in chosen:
        rows[version] = outcome_of(version, options.tests)
        print(*table(HEADS, [rows[version]]), sep="\n", flush=True)
        if not options.tests:  # at once: another version may take an hour, or be interrupted
            PAGE.write_text(page_of(dict(sorted(rows.items()))), "utf-8")
    if options.page:
        PAGE.write_text(page_of(dict(sorted(rows.items()))), "utf-8")
    return 0 if all(is_right(rows[version]) for version in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
