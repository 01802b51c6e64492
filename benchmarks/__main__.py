"""Run every benchmark of this directory, or the named ones, each in a process of its own."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(names: list[str]) -> int:
    """Run the named benchmarks (all without a name) and return the exit code."""
    known = sorted(p.stem for p in HERE.glob("*.py") if not p.name.startswith("_"))
    if unknown := [name for name in names if name not in known]:
        print(f"no such benchmark: {', '.join(unknown)} (there are: {', '.join(known)})")
        return 2
    print(f"compared with torch {importlib.metadata.version('torch')}", flush=True)
    failed = []
    for name in names or known:
        print(f"== {name}", flush=True)
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}"],
            cwd=HERE.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        if done.returncode:
            failed.append(name)
            print(f"== {name} FAILED with exit code {done.returncode}", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
