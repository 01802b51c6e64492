"""Candidate plans: ways to get from one layout to another, which the planner scores.

On one mesh each candidate is a list of steps in the normal order: slice, reduce, exchange, gather,
zero-fill. Without pending reductions the direct exchange meets the lower bound on bytes.

For small tensors the number of messages matters more than bytes: a few collectives over one axis
each may beat one exchange among all ranks. `cheapest_chain` finds such chains by a least-cost
(Dijkstra) search over layouts. The search works on bare tuples and on the figures of the first
rank, whose shards are largest, so that looking at a move costs microseconds. Within its moves it is
exact.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

from shardwise.core.errors import LayoutError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.redistribute import step as steps
from shardwise.redistribute.cost import Costs, prices
from shardwise.redistribute.step import (
    Step,
    busiest,
    overlap,
    received,
    replicated_axes,
    volume,
    without,
)
from shardwise.redistribute.transfer import split_axes


def paths(source: Layout, target: Layout) -> Iterator[list[Step]]:
    """Yield all candidates from `source` to `target` on one mesh."""
    scaled = rescaled(source, target)
    start = [] if scaled is source else [steps.local("scale", source, scaled)]
    reduced = ending_axes(scaled, target)
    if not reduced and _only_zero_fill(scaled, target):
        yield [*start, steps.local("zero_fill", scaled, target)]
        return
    if new_axes(scaled, target):
        yield [*start, steps.reduce_exchange(scaled, target, pending_op(scaled, reduced))]
    for middle in _before_zero_fill(scaled, target):
        end = [] if middle is target else [steps.local("zero_fill", middle, target)]
        for path in _reductions(scaled, middle, reduced):
            yield [*start, *path, *end]


def cross_mesh_paths(source: Layout, target: Layout) -> Iterator[list[Step]]:
    """Yield candidates between two meshes: reduce on the first, exchange, zero-fill on the
    second."""
    _check_commute(target)
    bare = target.relaid(partial={})
    end = [] if bare is target else [steps.local("zero_fill", bare, target)]
    for start in _complete(source):
        here = start[-1].target if start else source
        yield [*start, steps.exchange(here, bare), *end]


def _complete(source: Layout) -> Iterator[list[Step]]:
    """Yield ways to complete the pending reductions of a layout."""
    bare = source.relaid(partial={})
    yield from paths(source, bare)
    if source.partial and source.ndim:
        dim = _longest_dim(source)
        order = list(source.shard_order)
        order[dim] = (*order[dim], *(axis for axis, _ in source.partial))
        yield from paths(source, source.relaid(order, {}))


def rescaled(source: Layout, target: Layout) -> Layout:
    """Return `source` with pending averages turned into sums, or the reverse, as in the target."""
    partial: dict[int, str] = {}
    wanted = dict(target.partial)
    for axis, op in source.partial:
        new = wanted.get(axis, op)
        if new != op and {op, new} != {"sum", "avg"}:
            raise LayoutError(
                f"redistribute: a pending {op} cannot become a pending {new} on axis "
                f"{source.mesh.axis_name(axis)}; go by Replicate() or Shard(dim) first "
                f"({source!r} -> {target!r})"
            )
        partial[axis] = new
    ending = {op for axis, op in source.partial if axis not in wanted}
    if ending == {"sum", "avg"}:  # a mean over some axes and a sum over others: sum both
        partial.update({axis: "sum" for axis, op in source.partial if axis not in wanted})
    if ending:
        _check_commute(source)
    if new_axes(source, target):
        _check_commute(target)
    return source.relaid(partial=partial)


def _check_commute(layout: Layout) -> None:
    """Check that all pending reductions are of one kind: otherwise their order would matter."""
    ops = {op for _, op in layout.partial}
    if len({"sum" if op == "avg" else op for op in ops}) > 1:
        raise LayoutError(
            f"redistribute: pending reductions of different kinds ({', '.join(sorted(ops))}) do "
            f"not commute, so {layout!r} has no value"
        )


def ending_axes(source: Layout, target: Layout) -> tuple[int, ...]:
    """Return the axes to reduce over."""
    kept = {axis for axis, _ in target.partial}
    return tuple(axis for axis, _ in source.partial if axis not in kept)


def new_axes(source: Layout, target: Layout) -> list[int]:
    """Return the axes along which a reduction is pending in the target only."""
    already = {axis for axis, _ in source.partial}
    return [axis for axis, _ in target.partial if axis not in already]


def pending_op(source: Layout, axes: tuple[int, ...]) -> str:
    """Return the reduction that is pending over these axes."""
    return dict(source.partial)[axes[0]] if axes else "sum"


def _only_zero_fill(source: Layout, target: Layout) -> bool:
    """Return whether a zero-fill alone makes the move: the ranks along the new pending axes already
    hold, together, all elements of the result."""
    new = new_axes(source, target)
    if not new:
        return False
    return busiest(volume(target) - overlap(source, target, frozenset(new))) == 0


def _before_zero_fill(source: Layout, target: Layout) -> Iterator[Layout]:
    """Yield layouts from which a zero-fill gives the target.

    Along an axis whose contributions the target adds up, each rank may hold a piece of its own and
    zeros elsewhere, or the first rank may hold everything.
    """
    new = new_axes(source, target)
    if not new:
        yield target
        return
    partial = without(target, tuple(new))
    order = list(target.shard_order)
    yield target.relaid(order, partial)
    for dim in range(target.ndim):
        spread = [axis for axis in new if axis in source.shard_order[dim]]
        order[dim] = (*order[dim], *spread)
    yield target.relaid(order, partial)
    rest = tuple(axis for axis in new if axis not in split_axes(source))
    if target.ndim and rest:
        dim = _longest_dim(target)
        order[dim] = (*order[dim], *rest)
        yield target.relaid(order, partial)


def _reductions(source: Layout, target: Layout, axes: tuple[int, ...]) -> Iterator[list[Step]]:
    """Yield candidates to a target without new pending reductions: reduce over `axes`, and move."""
    if not axes:
        yield from _moves(source, target)
        return
    op = pending_op(source, axes)
    early = _sliced_early(source, target)
    # A slice inside axes that are outer in the target may give shards that no rank wants.
    starts = [early] if early is source or _is_on_the_way(early, target) else [early, source]
    for start in starts:
        first = [] if start is source else [steps.local("slice", source, start)]
        for reduction in _named_reductions(start, target, axes, op):
            for path in _moves(reduction[-1].target, target):
                yield [*first, *reduction, *path]
        yield [*first, steps.reduce_exchange(start, target, op)]
        if (spread := _spread_over_replicas(target)) is not target:
            scattered = steps.reduce_exchange(start, spread, op)
            for path in _moves(spread, target):
                yield [*first, scattered, *path]


def _moves(source: Layout, target: Layout) -> Iterator[list[Step]]:
    """Yield candidates without reductions."""
    if source is target:
        yield []
        return
    if busiest(received(source, target)) == 0:
        yield [steps.local("slice", source, target)]
        return
    yield _gather_of_one_dim(source, target) or [steps.exchange(source, target)]


def _gather_of_one_dim(source: Layout, target: Layout) -> list[Step] | None:
    """Return the all-gather over innermost axes of one dim that does the move; None if none
    does."""
    changed = [
        dim for dim in range(source.ndim) if source.shard_order[dim] != target.shard_order[dim]
    ]
    if len(changed) != 1:
        return None
    before, after = source.shard_order[changed[0]], target.shard_order[changed[0]]
    if before[: len(after)] != after:
        return None
    return [steps.all_gather(source, changed[0], len(before) - len(after))]


def _sliced_early(source: Layout, target: Layout) -> Layout:
    """Return `source` sliced along the axes where it is whole and the target is not, so that fewer
    elements are reduced."""
    whole = set(replicated_axes(source))
    order = [
        (*before, *(axis for axis in after if axis in whole))
        for before, after in zip(source.shard_order, target.shard_order, strict=True)
    ]
    return source.relaid(order)


def _is_on_the_way(early: Layout, target: Layout) -> bool:
    """Return whether every shard of the target lies within one shard of `early`, dim by dim."""
    orders = zip(early.shard_order, target.shard_order, strict=True)
    return all(after[: len(before)] == before for before, after in orders)


def _named_reductions(
    source: Layout, target: Layout, axes: tuple[int, ...], op: str
) -> Iterator[list[Step]]:
    """Yield an all-reduce, and reduce-scatters into the dims of the target or into the longest."""
    yield [steps.all_reduce(source, axes, op)]
    if not source.ndim:
        return
    longest = _longest_dim(source)
    wanted = {
        axis: dim for dim, split in enumerate(target.shard_order) for axis in split if axis in axes
    }
    choices = [{axis: wanted.get(axis, longest) for axis in axes}, dict.fromkeys(axes, longest)]
    for dims in choices[: 1 if choices[0] == choices[1] else 2]:
        path: list[Step] = []
        here = source
        for dim in dict.fromkeys(dims.values()):
            # In the order of the target, where it has one.
            together = [axis for axis in target.shard_order[dim] if dims.get(axis) == dim]
            together += [axis for axis in axes if dims[axis] == dim and axis not in together]
            path.append(steps.reduce_scatter(here, tuple(together), dim, op))
            here = path[-1].target
        yield path


def _spread_over_replicas(target: Layout) -> Layout:
    """Return the target with its longest dim split further, so that no two ranks hold the same."""
    replicas = tuple(replicated_axes(target))
    if not target.ndim or not replicas:
        return target
    dim = _longest_dim(target)
    order = list(target.shard_order)
    order[dim] = (*order[dim], *replicas)
    return target.relaid(order)


def _longest_dim(layout: Layout) -> int:
    """Return the dim with the longest shards; the first of equals, as its pieces are contiguous."""
    lengths = layout.box([0] * layout.mesh.ndim).shape
    return max(range(layout.ndim), key=lambda dim: (lengths[dim], -dim))


# ---- chains of one-axis moves


class State(NamedTuple):
    """A layout without its mesh and shape: the axes of every dim, and the pending axes."""

    order: tuple[tuple[int, ...], ...]
    partial: tuple[int, ...]


class Hop(NamedTuple):
    """A move over one axis."""

    kind: str
    axis: int
    dim: int
    """The dim that it gathers or splits, or that the axis moves to."""
    received: int
    target: State


def hops(layout: Layout, state: State) -> Iterator[Hop]:
    """Yield every move from a state over one axis: gather, slice, move the axis to another dim, or
    reduce.

    Arguments:
        layout: gives the mesh, the shape, and the pending reductions that no move ends.
    """
    mesh = layout.mesh.shape
    order, partial = state
    lengths = [_length(layout, dim, axes) for dim, axes in enumerate(order)]
    held = math.prod(lengths)
    used = {*partial, *(axis for axis, _ in layout.partial)}
    for dim, axes in enumerate(order):
        used.update(axes)
        if not axes:
            continue
        axis, size = axes[-1], mesh[axes[-1]]
        whole = _length(layout, dim, axes[:-1])
        last = max(0, whole - (size - 1) * lengths[dim])
        rest = held // lengths[dim] if lengths[dim] else 0
        outer = _with(order, dim, axes[:-1])
        yield Hop("all_gather", axis, dim, (whole - last) * rest, State(outer, partial))
        for other, inner in enumerate(order):
            if other != dim:
                cut = -(-lengths[other] // size)
                part = rest // lengths[other] * cut if lengths[other] else 0
                target = State(_with(outer, other, (*inner, axis)), partial)
                yield Hop("exchange", axis, other, (whole - lengths[dim]) * part, target)
    for axis in range(len(mesh)):
        if axis not in used:
            for dim, inner in enumerate(order):
                yield Hop("slice", axis, dim, 0, State(_with(order, dim, (*inner, axis)), partial))
    for axis in partial:
        size = mesh[axis]
        left = tuple(other for other in partial if other != axis)
        yield Hop("all_reduce", axis, 0, 2 * held * (size - 1) // size, State(order, left))
        for dim, inner in enumerate(order):
            cut = -(-lengths[dim] // size) * (held // lengths[dim] if lengths[dim] else 0)
            target = State(_with(order, dim, (*inner, axis)), left)
            yield Hop("reduce_scatter", axis, dim, (size - 1) * cut, target)


def hop_prices(mesh: DeviceMesh, costs: Costs, itemsize: int) -> list[tuple[float, float]]:
    """Return for every axis the seconds of a collective: before its first byte, and per element."""
    return [(before, per_byte * itemsize) for before, per_byte in prices(mesh, costs)]


def seconds(hop: Hop, price: Sequence[tuple[float, float]]) -> float:
    """Return the time of a hop."""
    if hop.kind == "slice":
        return 0.0
    before, per_element = price[hop.axis]
    return before + hop.received * per_element


def cheapest_chain(
    source: Layout,
    target: Layout,
    ending: tuple[int, ...],
    costs: Costs,
    itemsize: int,
    limit: float = math.inf,
    most_states: int | None = None,
) -> list[Hop] | None:
    """Return the chain of least cost, or None if none costs less than `limit`.

    Arguments:
        ending: the axes to reduce over.
        most_states: the number of layouts to look at before giving up (by default, no limit).
    """
    partial = steps.without(source, ending)
    kept = source.relaid(partial=partial)
    goal = State(target.shard_order, ())
    ticket = count()  # ties are broken by age, the same on every rank
    start = State(source.shard_order, ending)
    queue: list[tuple[float, int, State, tuple[Hop, ...]]] = [(0.0, next(ticket), start, ())]
    done: set[State] = set()
    price = hop_prices(source.mesh, costs, itemsize)
    while queue:
        spent, _, state, chain = heapq.heappop(queue)
        if state == goal:
            return list(chain)
        if state in done:
            continue
        done.add(state)
        if most_states is not None and len(done) > most_states:
            return None
        for hop in hops(kept, state):
            total = spent + seconds(hop, price)
            if hop.target not in done and total < limit:
                heapq.heappush(queue, (total, next(ticket), hop.target, (*chain, hop)))
    return None


def as_steps(source: Layout, chain: list[Hop], op: str) -> list[Step]:
    """Return a chain as the steps of a plan."""
    path: list[Step] = []
    here = source
    for hop in chain:
        partial = steps.without(here, (hop.axis,))
        target = here.relaid(hop.target.order, partial)
        match hop.kind:
            case "all_gather":
                path.append(steps.all_gather(here, hop.dim, 1))
            case "exchange":
                path.append(steps.exchange(here, target))
            case "slice":
                path.append(steps.local("slice", here, target))
            case "all_reduce":
                path.append(steps.all_reduce(here, (hop.axis,), op))
            case _:
                path.append(steps.reduce_scatter(here, (hop.axis,), hop.dim, op))
        here = path[-1].target
    return path


def _length(layout: Layout, dim: int, axes: tuple[int, ...]) -> int:
    """Return the length of the first rank's shard along a dim split by `axes`."""
    length = layout.shape[dim]
    for axis in axes:
        length = -(-length // layout.mesh.shape[axis])
    return length


def _with(
    order: tuple[tuple[int, ...], ...], dim: int, axes: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    return (*order[:dim], axes, *order[dim + 1 :])
