"""How much memory a step holds at once on the busiest rank: input, buffers and result."""

from __future__ import annotations

from shardwise.redistribute.measure import (
    Sizes,
    axes_size,
    busiest,
    overlap,
    received,
    split_axes,
    volume,
)
from shardwise.redistribute.owners import Roles
from shardwise.redistribute.step import Step, rounds


def peak(step: Step) -> int:
    """In elements."""
    before, after = volume(step.source), volume(step.target)
    if step.source.mesh is not step.target.mesh:
        held = busiest(before) * (1 if not step.communicates else 2)
        return held + busiest(after) + step.received
    return busiest(before + after + _buffers(step, before, after))


def _buffers(step: Step, before: Sizes, after: Sizes) -> Sizes:
    """What is held besides input and result."""
    match step.kind:
        case "all_gather":
            return 0 if step.dim == 0 else after  # an inner dim is put together once more
        case "reduce_scatter":
            packed = 0 if step.dim == 0 else before
            return packed + axes_size(step.source.mesh, step.axes) * after
        case "exchange":
            return _sent(step) + received(step.source, step.target)
        case "reduce_exchange":
            first, second = rounds(step.source, step.target, Roles(step.source, step.target))
            return before + first + second
        case _:
            return 0


def _sent(step: Step) -> Sizes:
    """What each rank packs to send in an exchange."""
    source, target = step.source, step.target
    givers = split_axes(source)
    copies = axes_size(source.mesh, givers - split_axes(target))
    return overlap(target, source, givers) * copies - overlap(source, target)
