"""The time that `import shardwise` adds to `import torch`.

Two kinds of fresh interpreter take turns: one imports torch, the other torch and then shardwise.
The clock of the imports runs inside the child, that of the whole process outside it.
"""

import os
import subprocess
import sys
import tempfile
import time
from statistics import median

GOAL = 0.15  # seconds
WARM_UP = 2
RUNS = 9
# With bytecode files, as an installed package has them, wherever this runs.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": tempfile.mkdtemp()}
ENVIRONMENT.pop("PYTHONDONTWRITEBYTECODE", None)

TORCH = """
from time import perf_counter
start = perf_counter()
import torch
print(perf_counter() - start, 0.0)
"""
BOTH = """
from time import perf_counter
start = perf_counter()
import torch
middle = perf_counter()
import shardwise
end = perf_counter()
print(end - start, end - middle)
"""


def run(code: str) -> tuple[float, float, float]:
    """Run `code` in a new interpreter: seconds of all imports, of shardwise's, of the process."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    whole = time.perf_counter() - start
    imports, extra = map(float, done.stdout.split())
    return imports, extra, whole


def main() -> None:
    """Measure and print."""
    torch_runs, both_runs = [], []
    for i in range(WARM_UP + RUNS):
        alone, both = run(TORCH), run(BOTH)
        if i >= WARM_UP:
            torch_runs.append(alone)
            both_runs.append(both)

    def row(label: str, seconds: list[float]) -> tuple[float, float]:
        low, mid = min(seconds), median(seconds)
        print(f"{label:<34} {low:8.3f} {mid:8.3f}")
        return low, mid

    def difference(a: tuple[float, float], b: tuple[float, float]) -> None:
        print(f"{'  difference':<34} {b[0] - a[0]:8.3f} {b[1] - a[1]:8.3f}")

    print(f"{f'seconds, {RUNS} runs of each':<34} {'min':>8} {'median':>8}")
    a = row("import torch", [r[0] for r in torch_runs])
    b = row("import torch, shardwise", [r[0] for r in both_runs])
    difference(a, b)
    a = row("whole process: torch", [r[2] for r in torch_runs])
    b = row("whole process: torch, shardwise", [r[2] for r in both_runs])
    difference(a, b)
    _, extra = row("import shardwise, after torch", [r[1] for r in both_runs])
    verdict = "met" if extra <= GOAL else "MISSED"
    print(f"goal: shardwise adds at most {GOAL:.2f} s; median {extra:.3f} s: {verdict}")


if __name__ == "__main__":
    main()
