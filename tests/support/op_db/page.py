"""docs/op-coverage.md: the outcome of every operator in the sweep."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from support.op_db.entries import entries
from support.op_db.expected import FAMILIES, REFUSED, SOME_VERSIONS
from support.op_db.outcomes import NOTHING, Row

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "op-coverage.md"
ROWS = ROOT / "build" / "op_db"
"""Where the sweep leaves what it found, a file for each operator."""


def store(row: Row) -> None:
    """Store a row for the page."""
    ROWS.mkdir(parents=True, exist_ok=True)
    (ROWS / f"{row.name}.json").write_text(json.dumps(asdict(row), indent=1))


def stored() -> list[Row]:
    """Return the stored rows of all operators; raise if some were not tried."""
    missing = [name for name in entries() if not (ROWS / f"{name}.json").exists()]
    if missing:
        raise SystemExit(
            f"op_db: {len(missing)} operators have not been tried ({', '.join(missing[:5])}, ...): "
            "run `make sweep`"
        )
    paths = [ROWS / f"{name}.json" for name in entries()]
    return [Row(**json.loads(path.read_text("utf-8"))) for path in paths]


def written(rows: Sequence[Row], before: str = "") -> str:
    """Return the page.

    Arguments:
        before: the previous page, whose rows of operators that only other versions of torch have
            are kept.
    """
    return "\n".join(_lines(sorted(rows, key=lambda row: row.name.lower()), before)) + "\n"


def listed(text: str) -> dict[str, str]:
    """Return the lines of a page that describe one operator each, by name."""
    _, _, tables = text.partition("\n## All\n")
    lines = (line for line in tables.splitlines() if line.startswith("| `"))
    return {line.split("`")[1].replace("\\|", "|"): line for line in lines}


def outcome_of(line: str) -> str:
    """Return the outcome that such a line states."""
    return line.split(" | ")[1]


_HEAD = """\
# Operators

Which operators work on DTensors, which dims may be split, and what that sends. `make sweep` writes
this page; do not edit it. This one was made with torch {version}.

`op_db` is PyTorch's own list of operators, with samples of their arguments. Each operator is run on
DTensors, on meshes of 2, 3 and 2 x 2 ranks: with its tensors split along each dim (evenly or not),
whole, and as pending sums; as a function, as a method, in place and with `out=` where these exist.
Values, dtypes, shapes, gradients, and whether a result is a view, are compared with the same call
in one process.

| {operators} operators, {cases} cases | |
|---|---|
| by rule: right, and computed on the shards | {rule} |
| fallback in some case: right, but every rank computes everything | {fallback} |
| refused in some case, with a reason | {refused} |
| wrong | {wrong} |
| nothing to split: no tensors among the arguments, or not for CPUs | {nothing} |

**The DTensor of torch {version}** in the same run passes all cases of {always} of {tried}
operators, and {passed} of {their_cases} cases. It is asked for less than ours: it gets only some of
the cases, only as functions and with one dtype, and neither views nor random numbers are compared.
With tensors that are whole or evenly split over one axis, and with only values compared, it passes
{simple} of {simple_tried} operators.
"""

_ALL = """
## All

*splits* is about one sample: for each tensor its shape, its size in bytes and the dims that may be
split. In brackets: what one of two ranks receives in the forward if only this dim is split.
*torch*: how many of its cases torch's DTensor passes, and the most frequent problem of the others.

| operator | outcome | splits | torch |
|---|---|---|---|
"""


_SOME = """
## Only in some versions of torch

Operators that only newer or only older versions of torch have in `op_db`. Each row is from the last
`make sweep` with a version that has the operator.

| operator | outcome | splits | torch | versions |
|---|---|---|---|---|
"""


def _lines(rows: Sequence[Row], before: str) -> Iterator[str]:
    count = Counter(row.outcome for row in rows)
    tried = [row for row in rows if row.theirs]
    simple = [row.theirs_when_even for row in rows if row.theirs_when_even]
    yield _HEAD.format(
        version=torch.__version__.partition("+")[0],
        operators=len(rows),
        cases=sum(sum(row.counts.values()) for row in rows),
        rule=count["rule"],
        fallback=count["fallback"],
        refused=count["refused"],
        wrong=count["wrong"],
        nothing=count[NOTHING],
        always=sum(set(row.theirs) == {"pass"} for row in tried),
        tried=len(tried),
        passed=sum(row.theirs.get("pass", 0) for row in tried),
        their_cases=sum(sum(row.theirs.values()) for row in tried),
        simple=simple.count("pass"),
        simple_tried=len(simple),
    )
    yield "## Refused\n\n| operator | why |\n|---|---|"
    for row in rows:
        if row.outcome == "refused":
            yield f"| `{row.name}` | {REFUSED[row.name]} |"
    yield "\n## Families that never fall back\n\n| family | operators |\n|---|---|"
    for family, names in FAMILIES.items():
        yield f"| {family} | {', '.join(f'`{name}`' for name in names)} |"
    yield _ALL.rstrip("\n")
    tables = {row.name: _line(row) for row in rows}
    yield from (line for name, line in tables.items() if name not in SOME_VERSIONS)
    yield _SOME.rstrip("\n")
    kept = listed(before)
    for name, versions in sorted(SOME_VERSIONS.items(), key=lambda each: each[0].lower()):
        if name in tables:
            yield f"{tables[name]} {_between(*versions)} |"
        elif name in kept:
            yield kept[name]
    unstable = [row for row in rows if row.unstable]
    if unstable:
        yield "\n## Values that torch itself does not reproduce, which were not compared\n"
        yield "| operator | values |\n|---|---|"
        for row in unstable:
            yield f"| {row.name} | {_escaped('; '.join(row.unstable))} |"


def _line(row: Row) -> str:
    cells = (f"`{row.name}`", row.outcome, "; ".join(row.splits), _theirs(row))
    return f"| {' | '.join(map(_escaped, cells))} |"


def _between(first: str | None, end: str | None) -> str:
    """Return the versions of torch that have an operator, in words."""
    return " ".join([f"since {first}"] * bool(first) + [f"before {end}"] * bool(end))


def _theirs(row: Row) -> str:
    if not row.theirs:
        return ""
    passed, total = row.theirs.get("pass", 0), sum(row.theirs.values())
    if passed == total:
        return "all"
    problem, _ = max(
        ((text, times) for text, times in row.theirs.items() if text != "pass"),
        key=lambda each: each[1],
    )
    return f"{passed} of {total}; {problem}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
