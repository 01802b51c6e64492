"""The peak memory of a plan on the busiest rank: input, buffers and results.

The figures follow the execution on real ranks. The tensor a plan starts with belongs to the caller
and lives throughout. A packed buffer may live as long as its step, as a backend frees it when it
likes; received data live until they are put in place or reduced. A slice is a view, so it takes no
memory until the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from shardwise.comm import is_large
from shardwise.core.layout import Layout
from shardwise.redistribute.step import (
    Sizes,
    Step,
    axes_size,
    busiest,
    overlap,
    received,
    rounds,
    tiles,
    volume,
)
from shardwise.redistribute.transfer import Roles, split_axes


def peaks(path: Sequence[Step], dtype: torch.dtype) -> list[int]:
    """Return for every step of a plan the bytes that the busiest rank holds at once."""
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
    """Return the elements that a step holds at once besides its input."""
    before, after = volume(step.source), volume(step.target)
    match step.kind:
        case "all_gather":
            is_even = np.min(before) == np.max(before)
            is_packed = not is_even and not is_large(busiest(after) * dtype.itemsize)
            packed = axes_size(step.source.mesh, step.axes) * before if is_packed else 0
            return packed + after * (1 if _is_outermost(step) else 2)
        case "reduce_scatter":
            ranks = axes_size(step.source.mesh, step.axes)
            total = after * _copies_to_reduce(step.op, dtype)
            if is_large(busiest(before) * dtype.itemsize):
                # By messages: the rank's own part is not copied, and packed buffers are gone when
                # the sum is made.
                packed = 0 if _is_outermost(step) else (ranks - 1) * after
                return (ranks - 1) * after + np.maximum(packed, total)
            packed = 0 if _is_outermost(step) else before
            return packed + ranks * after + total
        case "all_reduce":
            return after * _copies_to_all_reduce(step.op, dtype)
        case "exchange" if step.source.mesh is not step.target.mesh:
            return _besides_cross_input(step)
        case "exchange" if not is_large(step.received * dtype.itemsize):
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
    """Return the number of copies of its input that a reduction needs.

    Half types are added in float32: the total and a term take twice the size of the input each.
    """
    is_half = dtype.is_floating_point and dtype.itemsize == 2
    return 4 if is_half and op not in ("max", "min") else 1


def _copies_to_all_reduce(op: str, dtype: torch.dtype) -> int:
    """Return the number of copies of its input that an all-reduce needs.

    An average is divided into a new tensor; floats are mapped to ordered integers for max and min.
    """
    copies = 2 if op == "avg" else 4 if op in ("max", "min") and dtype.is_floating_point else 1
    return 2 * copies + 1 if dtype.itemsize == 2 else copies


def _besides_packed(step: Step, after: Sizes) -> Sizes:
    """Return the elements held by an exchange that packs its sends and unpacks its receives."""
    moved = received(step.source, step.target)
    goes_as_it_is = (_copies(step) == 1) & (tiles(step.target, step.source) <= 1)
    sent = np.where(goes_as_it_is & _keeps_rows(step.source, step.target), 0, _sent(step))
    assembled = np.where((tiles(step.source, step.target) <= 1) & (moved > 0), 0, after)
    return moved + sent + assembled


def _besides_cross_input(step: Step) -> int:
    """Return the elements held by an exchange between two meshes; replicas share the sending."""
    source, target = step.source.mesh, step.target.mesh
    sent = math.ceil(step.mean_received * target.size() / source.size())
    return step.received + sent + busiest(volume(step.target))


def _besides_contributions(step: Step, after: Sizes) -> Sizes:
    """Return the elements held by a reduce-exchange: contributions, and the results of both
    rounds."""
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
    """Return whether pieces along the step's dim are adjacent in memory."""
    return all(size == 1 for size in step.source.shape[: step.dim])


def _keeps_rows(source: Layout, target: Layout) -> bool:
    """Return whether the target cuts shards of the source along their first dim only."""
    parts, wanted = (
        [[layout.mesh.shape[axis] for axis in axes] for axes in layout.shard_order[1:]]
        for layout in (source, target)
    )
    return all(one[: len(other)] == other for one, other in zip(parts, wanted, strict=True))


def _copies(step: Step) -> int:
    """Return the number of ranks that hold each element after an exchange."""
    return axes_size(step.source.mesh, split_axes(step.source) - split_axes(step.target))


def _sent(step: Step) -> Sizes:
    """Return the elements each rank sends to others in an exchange."""
    kept = overlap(step.source, step.target)
    return overlap(step.target, step.source, split_axes(step.source)) * _copies(step) - kept
