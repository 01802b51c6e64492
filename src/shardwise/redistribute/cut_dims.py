"""Moves of tensors with cut dims (cut in pieces, each split on its own), as ordinary moves.

Where a cut dim stays as it is, every rank keeps its share of it: the move takes place among
the ranks that have the same share, on the sub-mesh of the other axes, with the local size of that
dim. Otherwise the dim is first made whole and put in the order of the global tensor; or it is cut
in the end, which needs no communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.core import cut as cuts_of
from shardwise.core.cut import Cut
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.redistribute.candidates import ending_axes
from shardwise.redistribute.step import Step, local, without


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a move: one step or, if `step` is None, a move between ordinary layouts."""

    source: Layout
    target: Layout
    step: Step | None = None


def stages(source: Layout, target: Layout, place: Sequence[int] | None) -> list[Stage]:
    """Return the parts of a move for the rank at `place` (None: a rank outside the mesh)."""
    if source is target:
        return []
    if not (source.is_cut or target.is_cut):
        return [Stage(source, target)]
    if source.mesh is target.mesh and place is not None:
        kept = [_kept(source, target, dim) for dim in range(source.ndim)]
        if any(kept):
            return _beside(source, target, kept, place)
        ending = ending_axes(source, target)
        if source.is_cut and ending:  # less is reduced before it is gathered
            reduced = source.relaid(partial=without(source, ending))
            return [*stages(source, reduced, place), *stages(reduced, target, place)]
    if source.is_cut:
        dim = next(dim for dim, cut in enumerate(source.cuts) if cut is not None)
        step = _gather(source, dim)
        return [Stage(source, step.target, step), *stages(step.target, target, place)]
    pieces = zip(target.shard_order, target.cuts, strict=True)
    whole = target.relaid([axes if cut is None else () for axes, cut in pieces])
    first = [] if source is whole else [Stage(source, whole)]
    return [*first, Stage(whole, target, local("slice", whole, target))]


def _kept(source: Layout, target: Layout, dim: int) -> tuple[int, ...]:
    """Return the outer axes that split a cut dim in the same way in both layouts."""
    if source.cuts[dim] is None and target.cuts[dim] is None:
        return ()
    before, after = source.shard_order[dim], target.shard_order[dim]
    kept = 0
    for count in range(1, min(len(before), len(after)) + 1):
        axes = before[:count]
        if axes != after[:count]:
            break
        counts = _counts(source.mesh, axes)
        one, other = (
            cuts_of.canonical_cut(each.shape[dim], counts, each.cuts[dim])
            for each in (source, target)
        )
        if one == other:
            kept = count
    return before[:kept]


def _counts(mesh: DeviceMesh, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(mesh.shape[axis] for axis in axes)


def _beside(
    source: Layout, target: Layout, kept: list[tuple[int, ...]], place: Sequence[int]
) -> list[Stage]:
    """Return the move among the ranks with the same shares of the dims that stay."""
    fixed = {axis for axes in kept for axis in axes}
    rest = [axis for axis in range(source.mesh.ndim) if axis not in fixed]
    mesh = source.mesh.along(rest, place)
    before, after = (_inside(layout, kept, place, rest, mesh) for layout in (source, target))
    return stages(before, after, [place[axis] for axis in rest])


def _inside(
    layout: Layout,
    kept: list[tuple[int, ...]],
    place: Sequence[int],
    rest: list[int],
    mesh: DeviceMesh,
) -> Layout:
    """Return the layout, on the other axes, of the share that the rank at `place` keeps."""
    shape, order, cuts = [], [], []
    for dim, axes in enumerate(kept):
        cut: Cut | None = layout.cuts[dim]
        size = layout.shape[dim]
        if axes:
            whole = ((size, 1),) if cut is None else cut
            held = [place[axis] for axis in axes]
            cut = cuts_of.cut_within(whole, _counts(layout.mesh, axes), held)
            size = sum(length for length, _ in cut)
        shape.append(size)
        order.append([rest.index(axis) for axis in layout.shard_order[dim][len(axes) :]])
        cuts.append(cut)
    return Layout(mesh, shape, order, {rest.index(axis): op for axis, op in layout.partial}, cuts)


def _gather(source: Layout, dim: int) -> Step:
    """Return the step that makes a dim whole and puts its pieces in order."""
    axes = source.shard_order[dim]
    order = list(source.shard_order)
    order[dim] = ()
    target = source.relaid(order)
    first = (
        (0,) * source.mesh.ndim
    )  # it has the most of the other dims, and the last rank the least of this one
    others = math.prod(size for at, size in enumerate(source.local_shape(first)) if at != dim)
    last = source.local_shape([size - 1 for size in source.mesh.shape])[dim]
    moved = others * (source.shape[dim] - last)
    return Step("all_gather", source, target, axes, moved, moved, dim)


def in_order(layout: Layout, dim: int) -> list[tuple[int, int]]:
    """Return the ranges of the concatenated shards of all ranks that put a cut dim in the
    order of the global tensor."""
    cut = layout.cuts[dim]
    assert cut is not None, "an ordinary dim is in order"
    everywhere = cuts_of.all_shares(cut, _counts(layout.mesh, layout.shard_order[dim]))
    offset, found = 0, []
    for held in everywhere:
        for start, stop in held:
            if start < stop:
                found.append((start, (offset, offset + stop - start)))
                offset += stop - start
    return [where for _, where in sorted(found)]
