"""`PYTHONPATH=tests python -m op_db [name ...]`: try these operators of op_db, or all."""

from __future__ import annotations

import argparse
import sys
import time

import torch

from op_db.entries import named
from op_db.outcomes import PART, SWEEP, row_of


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m op_db", description=__doc__)
    parser.add_argument("names", nargs="*", help="operators of op_db; all if none is given")
    parser.add_argument("--part", action="store_true", help="only what `make test` tries")
    parser.add_argument("--worker", default="0/1", help="which share of them, as 0/2")
    parser.add_argument("--bad", action="store_true", help="show only what is wrong or falls back")
    options = parser.parse_args()
    torch.set_num_threads(1)
    at, count = map(int, options.worker.split("/"))
    for entry in named(options.names)[at::count]:
        start = time.perf_counter()
        row = row_of(entry.name, PART if options.part else SWEEP)
        took = time.perf_counter() - start
        if options.bad and row.outcome == "rule":
            continue
        print(f"{row.name}: {row.outcome} {row.counts} {row.forms} {took:.1f}s", flush=True)
        for text in row.texts + row.splits:
            print(f"    {text[:700]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
