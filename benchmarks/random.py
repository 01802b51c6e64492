"""Time of layout-independent random numbers, relative to torch's for the same number of elements.

Each row is one rank's shard of a global tensor, whose values depend on the global positions. Goal:
at most 5 times torch's time for typical shards. One thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

import shardwise as sw
from shardwise.random import samplers

SHARDS: list[tuple[str, tuple[int, ...], tuple[int, ...], list[sw.Placement]]] = [
    ("whole", (1,), (1024, 1024), [sw.Replicate()]),
    ("Shard(0) of 8", (8,), (4096, 2048), [sw.Shard(0)]),
    ("Shard(1) of 2", (2,), (4096, 512), [sw.Shard(1)]),
    ("Shard(1) of 8", (8,), (2048, 4096), [sw.Shard(1)]),
    ("Shard(1) of 64", (64,), (8192, 8192), [sw.Shard(1)]),
    ("Shard(0), Shard(2)", (4, 4), (16, 512, 2048), [sw.Shard(0), sw.Shard(2)]),
    ("uneven Shard(1) of 8", (8,), (4096, 2050), [sw.Shard(1)]),
    ("8 x 8", (1,), (8, 8), [sw.Replicate()]),
]
ROWS: list[tuple[str, Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = [
    ("rand", samplers.uniform, torch.rand),
    ("randn", samplers.normal, torch.randn),
    (
        "randn f64",
        lambda key, layout: samplers.normal(key, layout, dtype=torch.float64),
        lambda shape: torch.randn(shape, dtype=torch.float64),
    ),
    (
        "dropout mask",
        lambda key, layout: samplers.bernoulli(key, layout, 0.9, torch.float32, value=1 / 0.9),
        lambda shape: torch.empty(shape).bernoulli_(0.9).div_(0.9),
    ),
]


def seconds(*runs: Callable[[], object]) -> list[float]:
    """Return the best CPU time of each function over several runs in alternation. CPU time does not
    count other programs on the machine."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(9):
        for run, found in zip(runs, times, strict=True):
            begin = time.thread_time()
            run()
            found.append(time.thread_time() - begin)
    return list(map(min, times))


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(f"{'shard':>22} {'elements':>9} {'what':>13} {'ours':>11} {'torch':>11}  ratio (goal 5)")
    for name, sizes, shape, placements in SHARDS:
        layout = sw.Layout.from_placements(sw.DeviceMesh.abstract(sizes), shape, placements)
        local = layout.local_shape()
        for what, ours, theirs in ROWS:
            mine, other = seconds(
                partial(lambda make, how: make(samplers.draw_key(), how), ours, layout),
                partial(theirs, local),
            )
            verdict = "" if mine <= 5 * other else "  MISSED"
            print(
                f"{name:>22} {torch.Size(local).numel():>9} {what:>13} {mine * 1e6:>8.0f} us "
                f"{other * 1e6:>8.0f} us  {mine / other:5.1f}{verdict}"
            )


if __name__ == "__main__":
    main()
