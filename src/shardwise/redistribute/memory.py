"""How much memory a plan holds at once on the busiest rank: input, buffers and results.

The figures follow the execution on real ranks. The tensor a plan starts with belongs to the caller
and lives throughout. What is packed to be sent may live as long as the step, for a backend lets go
of it when it likes; what arrives lives until it has been put in its place or reduced. A slice is a
view, so it takes no memory until the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from shardwise.comm.c10d import LARGE
from shardwise.layout import Layout
from shardwise.redistribute.measure import (
    Sizes,
    axes_size,
    busiest,
    overlap,
    received,
    split_axes,
    tiles,
    volume,
)
from shardwise.redistribute.owners import Roles
from shardwise.redistribute.step import Step, rounds


def peaks(path: Sequence[Step], dtype: torch.dtype) -> list[int]:
    """For every step of a plan what is held at once, in bytes."""
    if not path:
        return []
    start, is_view, found = volume(path[0].source), True, []
    for step in path:
        parts = [start, 0 if is_view else volume(step.source), _besides_input(step, dtype)]
        if all(each.source.mesh is each.target.mesh for each in path):
            found.append(busiest(sum(parts)) * dtype.itemsize)
        else:
            found.append(sum(map(busiest, parts)) * dtype.itemsize)
        is_view = is_view and step.kind == "slice"
    return found


def _besides_input(step: Step, dtype: torch.dtype) -> Sizes:
    """What a step holds at once but for its input, in elements."""
    before, after = volume(step.source), volume(step.target)
    match step.kind:
        case "all_gather":
            is_even = np.min(before) == np.max(before)
            is_packed = not is_even and busiest(after) * dtype.itemsize < LARGE
            packed = axes_size(step.source.mesh, step.axes) * before if is_packed else 0
            return packed + after * (1 if _is_outermost(step) else 2)
        case "reduce_scatter":
            ranks = axes_size(step.source.mesh, step.axes)
            total = after * _copies_to_reduce(step.op, dtype)
            if busiest(before) * dtype.itemsize >= LARGE:
                # By messages: nothing is copied for the rank itself, and what was packed is gone
                # when the sum is made.
                packed = 0 if _is_outermost(step) else (ranks - 1) * after
                return (ranks - 1) * after + np.maximum(packed, total)
            packed = 0 if _is_outermost(step) else before
            return packed + ranks * after + total
        case "all_reduce":
            return after * _copies_to_all_reduce(step.op, dtype)
        case "exchange" if step.source.mesh is not step.target.mesh:
            return _besides_cross_input(step)
        case "exchange" if step.received * dtype.itemsize < LARGE:
            return _besides_packed(step, after)
        case "exchange":
            sent = 0 if _keeps_rows(step.source, step.target) else _sent(step)
            moved = received(step.source, step.target)
            return after + sent + (0 if _keeps_rows(step.target, step.source) else moved)
        case "reduce_exchange":
            return _besides_contributions(step, after)
        case _:
            return after


def _copies_to_reduce(op: str, dtype: torch.dtype) -> int:
    """Halves are added up in float32: a total and a term, each of twice their size."""
    is_half = dtype.is_floating_point and dtype.itemsize == 2
    return 4 if is_half and op not in ("max", "min") else 1


def _copies_to_all_reduce(op: str, dtype: torch.dtype) -> int:
    """Averages are divided into a new tensor; floats are ordered as integers for max and min."""
    copies = 2 if op == "avg" else 4 if op in ("max", "min") and dtype.is_floating_point else 1
    return 2 * copies + 1 if dtype.itemsize == 2 else copies


def _besides_packed(step: Step, after: Sizes) -> Sizes:
    """What an exchange holds that packs what it sends, and puts what it gets in its place."""
    moved = received(step.source, step.target)
    goes_as_it_is = (_copies(step) == 1) & (tiles(step.target, step.source) <= 1)
    sent = np.where(goes_as_it_is & _keeps_rows(step.source, step.target), 0, _sent(step))
    assembled = np.where((tiles(step.source, step.target) <= 1) & (moved > 0), 0, after)
    return moved + sent + assembled


def _besides_cross_input(step: Step) -> int:
    """What an exchange between two meshes holds; ranks that hold the same share the sending."""
    source, target = step.source.mesh, step.target.mesh
    sent = math.ceil(step.mean_received * target.size() / source.size())
    return step.received + sent + busiest(volume(step.target))


def _besides_contributions(step: Step, after: Sizes) -> Sizes:
    """What a reduce-exchange holds: contributions, what this rank makes of them, what others do."""
    roles = Roles(step.source, step.target)
    first, second = rounds(step.source, step.target, roles)
    free = frozenset({*roles.ending, *roles.split})
    sent = overlap(step.target, step.source, free)
    if _keeps_rows(step.source, step.target):
        sent = sent - overlap(step.source, step.target)
    others = axes_size(step.source.mesh, roles.replicas) - 1
    owned = second / others if others else after
    return first + np.maximum(sent, owned) + second + np.maximum(others * owned, after)


def _is_outermost(step: Step) -> bool:
    """Whether pieces along the step's dim follow one another in memory."""
    return all(size == 1 for size in step.source.shape[: step.dim])


def _keeps_rows(source: Layout, target: Layout) -> bool:
    """Whether shards of the target cut those of the source along their first dim only."""
    parts, wanted = (
        [[layout.mesh.shape[axis] for axis in axes] for axes in layout.shard_order[1:]]
        for layout in (source, target)
    )
    return all(one[: len(other)] == other for one, other in zip(parts, wanted, strict=True))


def _copies(step: Step) -> int:
    """How many ranks each element goes to, or stays at, in an exchange."""
    return axes_size(step.source.mesh, split_axes(step.source) - split_axes(step.target))


def _sent(step: Step) -> Sizes:
    """What each rank sends to others in an exchange."""
    kept = overlap(step.source, step.target)
    return overlap(step.target, step.source, split_axes(step.source)) * _copies(step) - kept
