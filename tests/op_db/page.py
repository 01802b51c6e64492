"""docs/op-coverage.md: what the sweep found, of every operator."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from op_db.entries import entries
from op_db.expected import FAMILIES, REFUSED
from op_db.outcomes import Row

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "op-coverage.md"
ROWS = ROOT / "build" / "op_db"
"""Where the sweep leaves what it found, a file for each operator."""


def store(row: Row) -> None:
    """Keep what was found for the page."""
    ROWS.mkdir(parents=True, exist_ok=True)
    (ROWS / f"{row.name}.json").write_text(json.dumps(asdict(row), indent=1))


def stored() -> list[Row]:
    """What was found of every operator; raises if some were not tried."""
    missing = [name for name in entries() if not (ROWS / f"{name}.json").exists()]
    if missing:
        raise SystemExit(
            f"op_db: {len(missing)} operators have not been tried ({', '.join(missing[:5])}, ...): "
            "run `make sweep`"
        )
    return [Row(**json.loads((ROWS / f"{name}.json").read_text())) for name in entries()]


def written(rows: Sequence[Row]) -> str:
    """The page."""
    return "\n".join(_lines(sorted(rows, key=lambda row: row.name.lower()))) + "\n"


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    count = Counter(row.outcome for row in rows)
    cases = sum(sum(row.counts.values()) for row in rows)
    theirs = sum(sum(row.theirs.values()) for row in rows)
    passed = sum(row.theirs.get("pass", 0) for row in rows)
    always = sum(row.torch == "passes" for row in rows)
    simple = sum(row.theirs_simple == "pass" for row in rows)
    tried = sum(bool(row.theirs) for row in rows)
    yield "# Operators"
    yield ""
    yield "Made by `make sweep`; not to be edited. Every entry of PyTorch's own list of operators and samples"
    yield "(`op_db`) is run on DTensors on meshes of 2, 3 and 2 x 2 ranks, with its tensors split along each dim,"
    yield "whole, and pending sums; as a function, a method, in place and with `out=` where there are such."
    yield "Values, dtypes, shapes, gradients, and whether a result is a view are compared with one process."
    yield ""
    yield f"| {len(rows)} operators | {cases} cases |"
    yield "|---|---|"
    yield f"| by rule | {count['rule']} |"
    yield f"| fall back in some case: right, but every rank computes all | {count['fallback']} |"
    yield f"| refused in some case, with a reason | {count['refused']} |"
    yield f"| wrong | {count['wrong']} |"
    yield f"| no tensors among the arguments, or none that run here: nothing to split | {count['no tensors']} |"
    yield ""
    yield f"torch's DTensor, in the same run, with the same harness: of {tried} operators it passes all cases of {always},"
    yield f"and of {theirs} cases {passed}. With tensors whole or split evenly along one axis, values only, it passes {simple} operators."
    yield ""
    yield "## Refused"
    yield ""
    yield "| operator | why |"
    yield "|---|---|"
    for name, why in sorted(REFUSED.items()):
        yield f"| `{name}` | {why} |"
    yield ""
    yield "## Families that must not fall back"
    yield ""
    yield "| family | operators |"
    yield "|---|---|"
    for family, names in FAMILIES.items():
        yield f"| {family} | {', '.join(f'`{name}`' for name in names)} |"
    yield ""
    yield "## All"
    yield ""
    yield "*Splits*: of one sample, for each tensor its shape, its bytes, and the dims that may be split; in brackets"
    yield "what one of two ranks receives in the call if only this dim is split, in bytes. *torch*: how many of the same cases"
    yield "torch's DTensor passes, and what is wrong with the first that it does not."
    yield ""
    yield "| operator | outcome | splits | torch |"
    yield "|---|---|---|---|"
    for row in rows:
        yield f"| `{row.name}` | {row.outcome} | {_escaped('; '.join(row.splits))} | {_escaped(row.torch)} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
