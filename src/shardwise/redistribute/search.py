"""Chains of one-axis moves, found by a least-cost (Dijkstra) search over layouts.

For small tensors the number of messages matters more than bytes: a few collectives over one axis
each may beat one exchange among all ranks. Within its moves the search is exact.

The search works on bare tuples and on the figures of the first rank, whose shards are largest, so
that a move costs microseconds to look at. The chain it finds is then made of ordinary steps.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from shardwise.layout import Layout
from shardwise.redistribute import step as steps
from shardwise.redistribute.cost import Costs
from shardwise.redistribute.step import Step


class State(NamedTuple):
    """A layout without its mesh and shape: the axes of every dim, and the pending ones."""

    order: tuple[tuple[int, ...], ...]
    partial: tuple[int, ...]


class Hop(NamedTuple):
    """A move over one axis."""

    kind: str
    axis: int
    dim: int
    """That it gathers, splits, or carries the axis to."""
    received: int
    target: State


def hops(layout: Layout, state: State) -> Iterator[Hop]:
    """Every move over one axis: gather or slice it, carry it to another dim, or reduce over it.

    `layout` tells mesh and shape, and that the pending reductions that do not end stay as they are.
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


def prices(layout: Layout, costs: Costs, itemsize: int) -> list[tuple[float, float]]:
    """For every axis the seconds of a collective along it: before its bytes, and for an element."""
    found = []
    for axis, size in enumerate(layout.mesh.shape):
        name = (layout.mesh.axis_name(axis),)
        before = costs.seconds(name, size - 1, 0)
        found.append((before, costs.seconds(name, size - 1, itemsize) - before))
    return found


def seconds(hop: Hop, price: list[tuple[float, float]]) -> float:
    """The time of a hop."""
    if hop.kind == "slice":
        return 0.0
    before, each = price[hop.axis]
    return before + hop.received * each


def cheapest_chain(
    source: Layout,
    target: Layout,
    ending: tuple[int, ...],
    costs: Costs,
    itemsize: int,
    limit: float = math.inf,
    most_states: int | None = None,
) -> list[Hop] | None:
    """The chain of least cost, or None if none costs less than `limit`.

    Arguments:
        ending: the axes to reduce over.
        most_states: give up after looking at so many layouts (by default, never).
    """
    partial = steps.without(source, ending)
    kept = source.relaid(partial=partial)
    goal = State(target.shard_order, ())
    ticket = count()  # ties are broken by age, the same on every rank
    start = State(source.shard_order, ending)
    queue: list[tuple[float, int, State, tuple[Hop, ...]]] = [(0.0, next(ticket), start, ())]
    done: set[State] = set()
    price = prices(source, costs, itemsize)
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
    """A chain as the steps of a plan."""
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
    """Of the first rank's shard."""
    length = layout.shape[dim]
    for axis in axes:
        length = -(-length // layout.mesh.shape[axis])
    return length


def _with(
    order: tuple[tuple[int, ...], ...], dim: int, axes: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    return (*order[:dim], axes, *order[dim + 1 :])
