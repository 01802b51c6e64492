"""Steps: the moves a plan is made of, each from one layout to another, with its figures.

A step's figures are global facts: those of the busiest rank, and means over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np

from shardwise.layout import Layout
from shardwise.redistribute.measure import (
    Sizes,
    axes_size,
    busiest,
    givers,
    mean,
    overlap,
    received,
    split_axes,
    tiles,
    volume,
)
from shardwise.redistribute.overlap import unsplit_axes
from shardwise.redistribute.owners import Roles

Kind = Literal[
    "slice",
    "scale",
    "reduce_scatter",
    "all_reduce",
    "reduce_exchange",
    "exchange",
    "all_gather",
    "zero_fill",
]
COLLECTIVES = ("reduce_scatter", "all_reduce", "reduce_exchange", "exchange", "all_gather")


@dataclass(frozen=True, slots=True)
class Step:
    """One move. Counts are in elements; a plan knows the size of one."""

    kind: Kind
    source: Layout
    target: Layout
    axes: tuple[int, ...] = ()
    """The axes it communicates over; none for a local step and between two meshes."""
    moved: Sizes = field(default=0, compare=False)
    """What each rank receives."""
    received: int = 0
    """By the busiest rank."""
    dim: int = 0
    """The dim that an all_gather joins or a reduce_scatter splits."""
    op: str = "sum"

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of its axes."""
        return tuple(map(self.source.mesh.axis_name, self.axes))

    @property
    def peers(self) -> int:
        """From how many ranks a rank receives, at most."""
        match self.kind:
            case "exchange":
                return _peers_of_exchange(self.source, self.target)
            case "reduce_exchange":
                return _peers_of_rounds(self.source, self.target)
            case _:
                return axes_size(self.source.mesh, self.axes) - 1

    @property
    def mean_received(self) -> float:
        """By a rank on average."""
        return mean(self.moved)

    @property
    def communicates(self) -> bool:
        """Whether it is a collective."""
        return self.kind in COLLECTIVES

    def __repr__(self) -> str:
        over = f" over {'.'.join(self.axis_names)}" if self.axes else ""
        return f"{self.kind}{over}: {self.source!r} -> {self.target!r}"


def local(kind: Kind, source: Layout, target: Layout) -> Step:
    """A step without communication: slice, scale or zero_fill."""
    return Step(kind, source, target)


@lru_cache(maxsize=4096)
def all_gather(source: Layout, dim: int, count: int) -> Step:
    """Make a dim whole over its `count` innermost axes."""
    axes = source.shard_order[dim][-count:]
    order = list(source.shard_order)
    order[dim] = order[dim][:-count]
    target = source.relaid(order)
    return _collective("all_gather", source, target, axes, received(source, target), dim)


@lru_cache(maxsize=4096)
def reduce_scatter(source: Layout, axes: tuple[int, ...], dim: int, op: str) -> Step:
    """Reduce over axes, and split a dim over them, inside its other axes."""
    order = list(source.shard_order)
    order[dim] = (*order[dim], *axes)
    target = source.relaid(order, without(source, axes))
    moved = (axes_size(source.mesh, axes) - 1) * volume(target)
    return _collective("reduce_scatter", source, target, axes, moved, dim, op)


@lru_cache(maxsize=4096)
def all_reduce(source: Layout, axes: tuple[int, ...], op: str) -> Step:
    """Reduce over axes; every rank gets the result."""
    target = source.relaid(partial=without(source, axes))
    size = axes_size(source.mesh, axes)
    moved = 2 * volume(source) * (size - 1) // size
    return _collective("all_reduce", source, target, axes, moved, op=op)


@lru_cache(maxsize=4096)
def exchange(source: Layout, target: Layout) -> Step:
    """Send every rank what it lacks, at once: one all-to-all of box overlaps."""
    axes: tuple[int, ...] = ()
    if source.mesh is target.mesh:
        axes = tuple(sorted(split_axes(source) - _outer_axes(source, target)))
    return _collective("exchange", source, target, axes, received(source, target))


@lru_cache(maxsize=4096)
def reduce_exchange(source: Layout, target: Layout, op: str) -> Step:
    """Reduce and move, in two rounds: see `shardwise.redistribute.owners`."""
    roles = Roles(source, target)
    first, second = rounds(source, target, roles)
    given_along = {*roles.ending, *roles.split} - _outer_axes(source, target)
    axes = tuple(sorted({*given_along, *roles.replicas}))
    return _collective("reduce_exchange", source, target, axes, first + second, op=op)


def rounds(source: Layout, target: Layout, roles: Roles) -> tuple[Sizes, Sizes]:
    """What each rank receives in the two rounds of a reduce-exchange."""
    mesh = source.mesh
    free = frozenset(roles.split - roles.fixed)
    missing = volume(target) - overlap(source, target, free)
    at_home = _divided(overlap(source, target), axes_size(mesh, roles.sharing))
    away = _divided(missing, axes_size(mesh, roles.able))
    contributions = axes_size(mesh, roles.ending)
    first = (contributions - 1) * at_home + contributions * away
    owned = np.broadcast_to(at_home + away, mesh.shape)
    return first, owned.sum(axis=tuple(roles.replicas), keepdims=True) - owned


def collectives(step: Step) -> int:
    """How many calls it makes: the second round of a reduce-exchange only where it has replicas."""
    if step.kind == "reduce_exchange" and Roles(step.source, step.target).replicas:
        return 2
    return int(step.communicates)


def without(layout: Layout, axes: tuple[int, ...]) -> dict[int, str]:
    """The pending reductions of a layout but for those over `axes`."""
    return {axis: op for axis, op in layout.partial if axis not in axes}


def replicated_axes(layout: Layout) -> list[int]:
    """The axes along which all ranks hold the same."""
    pending = {axis for axis, _ in layout.partial}
    return [axis for axis in unsplit_axes(layout) if axis not in pending]


def _outer_axes(source: Layout, target: Layout) -> set[int]:
    """The outer axes that split the same dims of both layouts in the same way."""
    same: set[int] = set()
    for before, after in zip(source.shard_order, target.shard_order, strict=True):
        for one, other in zip(before, after, strict=False):
            if one != other:
                break
            same.add(one)
    return same


@lru_cache(maxsize=4096)
def _peers_of_exchange(source: Layout, target: Layout) -> int:
    return busiest(givers(source, target))


@lru_cache(maxsize=4096)
def _peers_of_rounds(source: Layout, target: Layout) -> int:
    """How many ranks a rank receives from, at most, in the two rounds of a reduce-exchange."""
    roles = Roles(source, target)
    home = np.broadcast_to(overlap(source, target) > 0, source.mesh.shape).astype(int)
    free = frozenset(roles.split - roles.fixed)
    away = tiles(source, target) - tiles(source, target, free)
    first = axes_size(source.mesh, roles.ending) * (home + away) - home
    owns = (home + away > 0).astype(int)
    second = owns.sum(axis=tuple(roles.replicas), keepdims=True) - owns
    return busiest(first + second)


def _divided(sizes: Sizes, parts: int) -> Sizes:
    return -(-np.asarray(sizes) // parts)


def _collective(
    kind: Kind,
    source: Layout,
    target: Layout,
    axes: tuple[int, ...],
    moved: Sizes,
    dim: int = 0,
    op: str = "sum",
) -> Step:
    return Step(kind, source, target, axes, moved, busiest(moved), dim, op)
