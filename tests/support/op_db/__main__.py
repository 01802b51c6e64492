"""`PYTHONPATH=tests python -m support.op_db [name ...]`: try these operators of op_db, or all."""

from __future__ import annotations

import argparse
import sys
import time
from difflib import get_close_matches

import torch

from support.op_db.entries import entries, named
from support.op_db.outcomes import PART, SWEEP, row_of
from support.op_db.page import PAGE, ROOT, stored, written


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m support.op_db", description=__doc__)
    parser.add_argument("names", nargs="*", help="operators of op_db; all if none is given")
    parser.add_argument("--part", action="store_true", help="only what `make test` tries")
    parser.add_argument("--worker", default="0/1", help="which share of them, as 0/2")
    parser.add_argument("--bad", action="store_true", help="show only what is wrong or falls back")
    parser.add_argument("--beside-torch", action="store_true", help="try torch's DTensor too")
    parser.add_argument("--page", action="store_true", help="write docs/op-coverage.md, no more")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(written(stored(), PAGE.read_text("utf-8")), "utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
        return
    unknown = [name for name in options.names if name not in entries()]
    if unknown:
        near = [each for name in unknown for each in get_close_matches(name, entries())]
        parser.error(f"op_db has no {', '.join(unknown)}; near: {', '.join(near) or 'nothing'}")
    torch.set_num_threads(1)
    at, count = map(int, options.worker.split("/"))
    for entry in named(options.names)[at::count]:
        start = time.perf_counter()
        row = row_of(entry.name, PART if options.part else SWEEP, options.beside_torch)
        took = time.perf_counter() - start
        if options.bad and row.outcome == "rule":
            continue
        print(f"{row.name}: {row.outcome} {row.counts} {row.forms} {took:.1f}s", flush=True)
        for text in row.texts + row.splits:
            print(f"    {text[:700]}", flush=True)
        if row.theirs:
            print(f"    torch: {row.theirs} {row.theirs_when_even}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
