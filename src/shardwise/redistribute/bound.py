"""The fewest bytes any plan can move.

Without pending reductions a rank must receive what it needs and does not hold: that bounds the
busiest rank. With p contributions to an element that r ranks (or groups of ranks) need, someone
must first complete it, which takes p - 1 messages, and every other needs one more; plus one if none
that needs it holds a contribution. That bounds the sum over all ranks, and so the mean.
"""

from __future__ import annotations

import math

from shardwise.layout import Layout
from shardwise.redistribute.measure import (
    axes_size,
    busiest,
    mean,
    overlap,
    received,
    split_axes,
    volume,
)
from shardwise.redistribute.step import replicated_axes


def is_mean(source: Layout, target: Layout) -> bool:
    """Whether the bound is one on the mean."""
    return bool(_ending(source, target) or _new(source, target))


def lower_bound(source: Layout, target: Layout) -> int:
    """In elements; of the busiest rank, or on average where a reduction is pending."""
    ending, new = _ending(source, target), _new(source, target)
    if not ending and not new:
        return busiest(received(source, target))
    if source.mesh is not target.mesh:
        return 0
    mesh = source.mesh
    need = volume(target)
    group = axes_size(mesh, new)  # ranks that together hold what they need
    together = (split_axes(source) - split_axes(target)) if ending else frozenset(new)
    missing = need - overlap(source, target, together)
    if not ending:
        return _up(mean(missing) / group)
    copies = axes_size(mesh, replicated_axes(target))
    contributions = axes_size(mesh, ending)
    messages = need * (contributions - 1 + copies - 1) + missing
    return _up(mean(messages) / copies / group)


def _ending(source: Layout, target: Layout) -> list[int]:
    kept = {axis for axis, _ in target.partial} if source.mesh is target.mesh else set()
    return [axis for axis, _ in source.partial if axis not in kept and source.mesh.shape[axis] > 1]


def _new(source: Layout, target: Layout) -> list[int]:
    already = {axis for axis, _ in source.partial} if source.mesh is target.mesh else set()
    return [axis for axis, _ in target.partial if axis not in already]


def _up(count: float) -> int:
    return math.ceil(count - 1e-6)
