"""The time to plan a redistribution that is not in any cache.

Random pairs of layouts (nested shards in any order, pending sums) on abstract meshes; every cache
is cleared before each. Goals: at most 1 ms up to 64 ranks, 60 ms at 4,096.
"""

from __future__ import annotations

import random
import sys
import time
from types import ModuleType

import torch

import shardwise as sw

CASES = [
    ((4, 8), (4096, 4096), 1e-3),
    ((8, 8), (4096, 4096), 1e-3),
    ((4, 4, 4), (4096, 4096), 1e-3),
    ((4, 4, 4), (64, 64, 64), 1e-3),
    ((64, 64), (8192, 8192), 60e-3),
    ((16, 16, 16), (8192, 8192), 60e-3),
]
COUNT = 150


def random_layout(mesh: sw.DeviceMesh, shape: tuple[int, ...], draw: random.Random) -> sw.Layout:
    """Return a random layout: each axis replicates, has a pending sum, or splits some dim.

    Axes that split one dim come in random order.
    """
    order: dict[int, list[int]] = {dim: [] for dim in range(len(shape))}
    partial: dict[int | str, str] = {}
    for axis in draw.sample(range(mesh.ndim), mesh.ndim):
        choice = draw.choice(["whole", "pending", *range(len(shape))])
        if choice == "pending":
            partial[axis] = "sum"
        elif choice != "whole":
            order[choice].append(axis)
    return sw.Layout(mesh, shape, order, partial)


def clear_caches() -> None:
    """Clear all caches of the planner."""
    for name, module in list(sys.modules.items()):
        if name.startswith("shardwise.redistribute") and isinstance(module, ModuleType):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def seconds(source: sw.Layout, target: sw.Layout) -> float:
    """Return the best of three runs with empty caches: the machine is noisy."""
    times = []
    for _ in range(3):
        clear_caches()
        begin = time.perf_counter()
        sw.plan_redistribute(source, target)
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(f"{'mesh':>10} {'tensor':>14} {'median':>9} {'90 %':>9} {'most':>9}   goal")
    for sizes, shape, goal in CASES:
        draw = random.Random(0)
        mesh = sw.DeviceMesh.abstract(sizes, tuple("xyz"[: len(sizes)]))
        pairs = [
            (random_layout(mesh, shape, draw), random_layout(mesh, shape, draw))
            for _ in range(COUNT)
        ]
        times = sorted(seconds(*pair) for pair in pairs)
        most = times[-1]
        shown = [times[COUNT // 2], times[COUNT * 9 // 10], most]
        over = sum(each > goal for each in times)
        verdict = "" if most <= goal else f"  MISSED by {over} of {COUNT}"
        print(
            f"{'x'.join(map(str, sizes)):>10} {'x'.join(map(str, shape)):>14} "
            + " ".join(f"{each * 1e3:>6.2f} ms" for each in shown)
            + f"   {goal * 1e3:.0f} ms{verdict}"
        )


if __name__ == "__main__":
    main()
