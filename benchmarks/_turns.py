"""Time several implementations of one step in the same processes, in alternation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

from shardwise import torch_patches

WARM_UP = 1
"""Rounds that do not count."""


@contextmanager
def without_patches() -> Iterator[None]:
    """Undo shardwise's patches of torch within, so that they do not slow down the other
    implementations."""
    torch_patches.uninstall()
    try:
        yield
    finally:
        torch_patches.install()


def taking_turns(
    steps: Mapping[str, Callable[[], object]],
    ours: Collection[str],
    rounds: int,
    seconds: float = math.inf,
) -> dict[str, list[float]]:
    """Return the seconds of each step in each round, on the slowest rank; all ranks start together.

    Arguments:
        steps: the steps by name; each round begins with another one.
        ours: the names of the steps that need our patches.
        rounds: the number of rounds.
        seconds: no round begins after this time.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    total = 0.0
    for turn in range(WARM_UP + rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            with nullcontext() if name in ours else without_patches():
                begin = time.perf_counter()
                steps[name]()
                spent = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            total += spent.item()
            if turn >= WARM_UP:
                times[name].append(spent.item())
        if total > seconds and turn >= WARM_UP:
            break
    return times
