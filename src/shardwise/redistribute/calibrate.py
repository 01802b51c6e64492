"""Measure what communication costs along each axis of a mesh."""

from __future__ import annotations

import statistics
import time

import torch

from shardwise.comm import Communicator, communicator
from shardwise.core.mesh import DeviceMesh
from shardwise.redistribute.cost import LOOPBACK, AxisCost, Costs, CostsError, set_costs

_TINY, _LARGE = 8, 1 << 22
"""Bytes to each peer: few, to measure latency, and many, to measure bandwidth."""


def calibrate(mesh: DeviceMesh, *, repeats: int = 20) -> Costs:
    """Measure the latency and bandwidth of every axis; all ranks of the mesh call it together.

    Each axis is timed with an all-to-all along it, all its groups at once as in a real program. The
    slowest rank counts, and every rank gets the same result. From then on moves and operators on
    this mesh are planned with these costs.

    Arguments:
        repeats: how often each size is timed; the median counts.
    """
    if repeats < 1:
        raise CostsError(f"repeats: expected at least 1, got {repeats}")
    everybody = communicator(mesh)
    tiny, large = {}, {}
    for axis in range(mesh.ndim):
        if mesh.shape[axis] > 1:
            group, name = communicator(mesh, axis), mesh.axis_name(axis)
            tiny[name] = _seconds(group, everybody, mesh.device_type, _TINY, repeats)
            large[name] = _seconds(group, everybody, mesh.device_type, _LARGE, repeats)
    # One size of group cannot tell the start of a collective from its messages: assume half.
    start = min(tiny.values(), default=2 * LOOPBACK.start) / 2
    sizes = {mesh.axis_name(axis): mesh.shape[axis] for axis in range(mesh.ndim)}
    axes = {
        name: AxisCost(
            alpha=(tiny[name] - start) / (sizes[name] - 1),
            beta=max(0.0, large[name] - tiny[name]) / (_LARGE * (sizes[name] - 1)),
        )
        for name in tiny
    }
    costs = Costs(axes, LOOPBACK.default, start)
    set_costs(mesh, costs)
    return costs


def _seconds(
    group: Communicator, everybody: Communicator, device: str, bytes: int, repeats: int
) -> float:
    """Return the median time of an all-to-all on the slowest rank, after warm-up."""
    pieces = [torch.zeros(bytes, dtype=torch.uint8, device=device) for _ in range(group.size)]
    times = []
    for repeat in range(repeats + 3):
        everybody.barrier()
        begin = time.perf_counter()
        group.all_to_all(pieces)
        if repeat >= 3:
            times.append(time.perf_counter() - begin)
    slowest = everybody.all_reduce(torch.tensor(statistics.median(times), device=device), "max")
    return float(slowest)
