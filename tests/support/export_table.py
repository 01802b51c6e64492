"""`PYTHONPATH=tests python -m support.export_table [--page]`: compare with torch's own.

Both get the same programs, before and after `run_decompositions()`, and the same styles, on two
ranks over gloo. --page writes the table into docs/export.md.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from shardwise.parallel.plan_spec import matches
from support.export_styles import CASES, Case, called, collectives

PAGE = Path(__file__).resolve().parents[2] / "docs" / "export.md"
BEGIN, END = "<!-- table: python -m support.export_table --page -->\n", "<!-- end of table -->"
RANKS = 2
SHORT = {"all_gather_into_tensor": "all-gather", "reduce_scatter_tensor": "reduce-scatter"}
LONGEST = 90


def ours(program: torch.export.ExportedProgram, case: Case, rank: int) -> Any:
    from shardwise.export import tensor_parallel_transformation

    return tensor_parallel_transformation(program, rank, RANKS, "cpu", case.styles)


def theirs(program: torch.export.ExportedProgram, case: Case, rank: int) -> Any:
    from torch.distributed.tensor.experimental._tp_transform import tensor_parallel_transformation
    from torch.distributed.tensor.parallel import style as styles

    named = {"colwise": "Colwise", "rowwise": "Rowwise", "sequence": "Sequence"}
    paths = {name.rpartition(".")[0] for name in program.state_dict}
    plan = {}
    for pattern, style in (case.theirs or case.styles).items():
        if isinstance(style, str):
            style = getattr(styles, f"{named[style]}Parallel")
        elif inspect.isclass(style):
            style = getattr(styles, style.__name__)
        else:
            style = getattr(styles, type(style).__name__)()
        plan |= dict.fromkeys([path for path in paths if matches(pattern, path)], style)
    return tensor_parallel_transformation(program, rank, RANKS, "cpu", plan)


def outcome(transform: Callable[..., Any], program: Any, case: Case, rank: int) -> str:
    """Return the number of collectives, or the error in a few words."""
    try:
        local = transform(copy.deepcopy(program), case, rank)
        _, args, kwargs = case.made()
        got = called(local.module(), args, kwargs)
    except Exception as error:
        said = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {said[0] if said else 'no message'}"
        return f"fails: {text if len(text) <= LONGEST else text[:LONGEST] + '...'}"
    try:
        torch.testing.assert_close(got, case.expected(), rtol=1e-4, atol=1e-5)
    except AssertionError:
        return "**wrong**"
    parts = []
    for name, count in sorted(collectives(local).items()):
        kind = SHORT.get(name, name.replace("_", "-"))
        parts.append(f"{count} {kind}{'s' * (count > 1)}")
    return ", ".join(parts) or "nothing travels"


def outcomes() -> dict[str, list[str]]:
    """Return for each case: torch and shardwise as exported, torch and shardwise decomposed."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    found: dict[str, list[str]] = {}
    for name, case in CASES.items():
        exported = case.exported()
        for program in (exported, exported.run_decompositions()):
            for transform in (theirs, ours):
                found.setdefault(name, []).append(outcome(transform, program, case, rank))
    return found


def table(found: dict[str, list[str]]) -> str:
    lines = [
        "| | torch, as exported | torch, decomposed | shardwise |",
        "|---|---|---|---|",
    ]
    for name, (torch_first, first, torch_then, then) in found.items():
        both = first if first == then else f"{first}; decomposed: {then}"
        cells = [name, torch_first, torch_then, both]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    count = len(found)
    runs = [
        sum(not row[at].startswith(("fails", "**")) for row in found.values()) for at in range(4)
    ]
    version = torch.__version__.partition("+")[0]
    summary = (
        f"Right, with torch {version} on {RANKS} ranks: torch {runs[0]} of {count} as exported and "
        f"{runs[2]} decomposed, shardwise {runs[1]} and {runs[3]}."
    )
    return "\n".join([*lines, "", summary, ""])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m support.export_table", description=__doc__)
    parser.add_argument("--page", action="store_true", help="write it into docs/export.md")
    options = parser.parse_args()
    with sw.Workers(RANKS, timeout=300) as workers:
        first, *others = workers.run(outcomes)
    for name, row in first.items():
        for other in others:
            if [each[:5] for each in other[name]] != [each[:5] for each in row]:
                sys.exit(f"ranks disagree on {name}: {row}, {other[name]}")
    text = table(first)
    if not options.page:
        print(text)
        return
    head, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", "utf-8")
    print(f"wrote {PAGE.name}")


if __name__ == "__main__":
    main()
