"""The choice of how to split a call: the least communication for the inputs as they lie.

For each axis of the mesh a call either splits one factor (or two, if its lowering can exchange what
then lies apart), or lets pending sums flow through its linear inputs, or has everything whole. Only
what some input already does on that axis is considered, so a layout never comes from nowhere; but
where an input is split along a dim that must be whole, the axis may go to another dim of it: an
exchange in place of a gather. The choice is a function of layouts and of the rule alone: all ranks
make the same. What a lowering moves itself counts if the rule says how much that is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import NamedTuple

from shardwise import cut as cuts_of
from shardwise.comm import carries_values
from shardwise.cut import Cut
from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh
from shardwise.rules.spec import Dims, Here, Out, Spec

_SECONDS_PER_COLLECTIVE = 3e-5
_SECONDS_PER_ELEMENT = 4e-9
_MOST_CHOICES = 512


class Way(NamedTuple):
    """What a call does on one axis: split a factor, let a pending reduction flow, or neither."""

    factor: str | None = None
    also: str | None = None
    """A factor that it splits too, of those that no result has."""
    flow: tuple[int, ...] | None = None
    op: str = "sum"
    cut: Cut | None = None
    """The pieces of the factor's dim, if it is cut."""
    size: int | None = None
    """Of the dim that the cut is of, or that others are scaled to."""

    @property
    def factors(self) -> tuple[str, ...]:
        """All that are split."""
        return tuple(each for each in (self.factor, self.also) if each is not None)


WHOLE = Way()


@dataclass(frozen=True, slots=True)
class Choice:
    """How a call is split, and so how its inputs must lie and its results will."""

    here: Here
    used_on: tuple[tuple[int, ...], ...]
    """For each input the axes on which it is whole beside shards: its gradient there is a
    contribution."""
    seconds: float
    """A rough estimate of the communication."""

    @property
    def inputs(self) -> tuple[Layout, ...]:
        """How the inputs must lie."""
        return self.here.inputs

    @property
    def outputs(self) -> tuple[Layout, ...]:
        """How the results lie."""
        return self.here.outputs


def choose(
    spec: Spec, layouts: Sequence[Layout], mesh: DeviceMesh, *, keeps: Layout | None = None
) -> Choice | None:
    """The cheapest way to run a call.

    Arguments:
        spec: what the rule says.
        layouts: how the inputs lie.
        mesh: where.
        keeps: how the first input lies and the first result must (an in-place operator); None is
            returned if that cannot be.
    """
    ways = [list(_ways(spec, layouts, axis)) for axis in range(mesh.ndim)]
    best: Choice | None = None
    best_rank: tuple[float, int, int] | None = None
    for choice in islice(product(*ways), _MOST_CHOICES):
        made = _made(spec, layouts, mesh, choice)
        if made is None:
            continue
        if keeps is not None and not (made.inputs[0] is keeps and made.outputs[0] is keeps):
            continue
        moved = sum(a is not b for a, b in zip(layouts, made.inputs, strict=True))
        # What is pending must be reduced some day; that counts only against other communication.
        later = sum(map(_reduction, made.outputs)) if made.seconds else 0.0
        rank = (made.seconds + later, sum(len(each.partial) for each in made.outputs), moved)
        if best_rank is None or rank < best_rank:
            best, best_rank = made, rank
    return best


def _reduction(layout: Layout) -> float:
    """Roughly the seconds to reduce what is pending, and leave it split."""
    sizes = layout.mesh.shape
    held = layout.numel / math.prod(sizes[axis] for axes in layout.shard_order for axis in axes)
    return sum(
        _SECONDS_PER_COLLECTIVE + held * (sizes[axis] - 1) / sizes[axis] * _SECONDS_PER_ELEMENT
        for axis, _ in layout.partial
        if sizes[axis] > 1
    )


def _ways(spec: Spec, layouts: Sequence[Layout], axis: int) -> Iterator[Way]:
    """What can be done on an axis, in a fixed order, the inputs' own ways first."""
    seen: dict[Way, None] = {}  # in the order in which they were found
    for position, ((_, dims), layout) in enumerate(zip(spec.inputs, layouts, strict=True)):
        for dim, (factor, axes) in enumerate(zip(dims, layout.shard_order, strict=True)):
            if axis not in axes:
                continue
            if factor is not None and _splits(spec, factor):
                found = _splitting(spec, factor, layout, dim)
            else:
                found = _exchanging(spec, dims, layout, axis)
            for way in found:
                if way not in seen:
                    seen[way] = None
                    yield way
        for pending, op in layout.partial:
            if pending != axis or op not in ("sum", "avg"):
                continue
            for flow in spec.linear:
                way = Way(flow=tuple(flow), op=op)
                if position in flow and way not in seen:
                    seen[way] = None
                    yield way
    if spec.together and carries_values(layouts[0].mesh):
        yield from _together(spec, layouts, axis, seen)
    yield WHOLE


def _together(
    spec: Spec, layouts: Sequence[Layout], axis: int, found: Collection[Way]
) -> Iterator[Way]:
    """Two factors at once, both of which inputs split along this axis."""
    for factor, also in spec.together:
        if any(way.factor == also for way in found):
            for way in found:
                if way.factor == factor:
                    yield way._replace(also=also)


def _splitting(spec: Spec, factor: str, layout: Layout, dim: int) -> Iterator[Way]:
    """Ways to split a factor as a dim of an input is: keeping its cut if it may, and without."""
    cut, size = layout.cuts[dim], layout.shape[dim]
    if cut is not None and _may_be_cut(spec, factor):
        yield Way(factor, cut=cut, size=size)
    yield Way(factor, size=size if spec.scales else None)


def _exchanging(spec: Spec, dims: Dims, layout: Layout, axis: int) -> Iterator[Way]:
    """Ways that put an axis on another dim of an input, as the one it splits must be whole."""
    sizes = layout.mesh.shape
    for factor, size, axes in zip(dims, layout.shape, layout.shard_order, strict=True):
        pieces = sizes[axis] * math.prod(sizes[each] for each in axes)
        free = factor is not None and any(factor in out.dims for out in spec.outputs)
        if free and axis not in axes and size >= pieces:
            yield Way(factor, size=size if spec.scales else None)


def _may_be_cut(spec: Spec, factor: str) -> bool:
    if spec.positions is None:
        return spec.lower is None and spec.allows is None
    return factor not in spec.positions


def _splits(spec: Spec, factor: str) -> bool:
    return factor in spec.reduces or any(factor in out.dims for out in spec.outputs)


def _made(
    spec: Spec, layouts: Sequence[Layout], mesh: DeviceMesh, ways: tuple[Way, ...]
) -> Choice | None:
    splits: dict[str, tuple[int, ...]] = {}
    for axis, way in enumerate(ways):
        for each in way.factors:
            splits[each] = (*splits.get(each, ()), axis)
    for factor, axes in splits.items():
        if len(axes) > 1:
            splits[factor] = _ordered(spec, layouts, factor, axes)
    if spec.allows is not None and splits and not spec.allows(splits, mesh):
        return None
    try:
        return _choice(spec, layouts, mesh, ways, splits)
    except _TornError:
        return None


class _TornError(Exception):
    """What cannot be: a boundary that is no whole index or within a unit; a pending reduction that
    becomes another, as a maximum a sum."""


class _Cuts:
    """How the dims of split factors are cut in pieces."""

    def __init__(
        self,
        spec: Spec,
        mesh: DeviceMesh,
        splits: Mapping[str, tuple[int, ...]],
        ways: Sequence[Way],
    ) -> None:
        self.spec = spec
        self.counts = {
            factor: tuple(mesh.shape[axis] for axis in axes) for factor, axes in splits.items()
        }
        self.given: dict[str, tuple[Cut, int]] = {}
        """The cut that inputs have, of a dim of this size; only where there is one to heed."""
        for way in sorted(ways, key=lambda way: way.cut is None):  # those that are cut first
            if way.factor is not None and way.size is not None:
                cut = way.cut or ((way.size, 1),)
                self.given.setdefault(way.factor, (cut, way.size))

    def of_inputs(self, dims: Dims, shape: Sequence[int]) -> tuple[Cut | None, ...] | None:
        """The cut of each dim of an input; None if no input has one to heed."""
        if not self.given:
            return None
        return tuple(map(self._scaled, dims, shape))

    def of_output(self, number: int, dims: Dims, shape: Sequence[int]) -> dict[int, Cut | None]:
        """The cuts of a result's dims, by dim."""
        found = {}
        for dim, (factor, size) in enumerate(zip(dims, shape, strict=True)):
            if factor not in self.given:
                continue
            if self.spec.recut is None:
                found[dim] = self._scaled(factor, size)
            else:
                cut, _ = self.given[factor]
                found[dim] = self.spec.recut(factor, number, cut, self.counts[factor])
                if found[dim] is None:
                    raise _TornError
        return found

    def _scaled(self, factor: str | None, size: int) -> Cut | None:
        if factor is None or factor not in self.given:
            return None
        cut, known = self.given[factor]
        if size == known:
            return cut
        made = cuts_of.rescaled(cut, size, self.counts[factor]) if self.spec.scales else None
        if made is None:
            raise _TornError
        return made


def _choice(
    spec: Spec,
    layouts: Sequence[Layout],
    mesh: DeviceMesh,
    ways: tuple[Way, ...],
    splits: dict[str, tuple[int, ...]],
) -> Choice:
    """How everything lies if each axis goes this way; raises if a cut cannot be kept."""
    cuts = _Cuts(spec, mesh, splits, ways)
    targets, used = [], []
    for position, ((_, dims), layout) in enumerate(zip(spec.inputs, layouts, strict=True)):
        order = tuple(splits.get(each, ()) if each is not None else () for each in dims)
        pending: list[tuple[int, str]] = []
        beside: list[int] = []
        for axis, way in enumerate(ways):
            if way.flow is not None:
                if position in way.flow:
                    pending.append((axis, way.op))
                elif mesh.shape[axis] > 1:
                    beside.append(axis)
            elif way.factor is not None and not any(each in dims for each in way.factors):
                if position in spec.additive and spec.reduces.get(way.factor) == "sum":
                    pending.append((axis, "sum"))
                elif mesh.shape[axis] > 1:
                    beside.append(axis)
        _check_pending(layout, pending)
        pieces = cuts.of_inputs(dims, layout.shape)
        targets.append(laid(layout, order, tuple(pending), pieces))
        used.append(tuple(beside))
    outputs = tuple(
        _output(spec, mesh, out, splits, ways, cuts.of_output(number, out.dims, out.shape))
        for number, out in enumerate(spec.outputs)
    )
    here = Here(mesh, splits, tuple(targets), outputs)
    seconds = sum(map(estimate, layouts, targets))
    if spec.moves is not None:
        collectives, elements = spec.moves(here)
        seconds += collectives * _SECONDS_PER_COLLECTIVE + elements * _SECONDS_PER_ELEMENT
    return Choice(here, tuple(used), seconds)


def _check_pending(layout: Layout, wanted: Sequence[tuple[int, str]]) -> None:
    pending = dict(layout.partial)
    for axis, op in wanted:
        ops = {op, pending.get(axis, op)}
        if len(ops) > 1 and ops != {"sum", "avg"}:
            raise _TornError


def laid(
    layout: Layout,
    order: tuple[tuple[int, ...], ...],
    pending: tuple[tuple[int, str], ...],
    cuts: tuple[Cut | None, ...] | None = None,
) -> Layout:
    """The layout with this order, these pending reductions and cuts; itself if it has them."""
    cuts = (None,) * layout.ndim if cuts is None else cuts
    if layout.shard_order == order and layout.partial == pending and layout.cuts == cuts:
        return layout
    return layout.relaid(order, dict(pending), cuts)


def _ordered(
    spec: Spec, layouts: Sequence[Layout], factor: str, axes: tuple[int, ...]
) -> tuple[int, ...]:
    """The axes that split a factor, in the order the largest input has them."""
    by_size = sorted(zip(spec.inputs, layouts, strict=True), key=lambda each: -each[1].numel)
    order: list[int] = []
    for (_, dims), layout in by_size:
        for name, given in zip(dims, layout.shard_order, strict=True):
            if name == factor:
                order += [axis for axis in given if axis in axes and axis not in order]
    return tuple(order) + tuple(axis for axis in axes if axis not in order)


def _output(
    spec: Spec,
    mesh: DeviceMesh,
    out: Out,
    splits: dict[str, tuple[int, ...]],
    ways: tuple[Way, ...],
    cuts: Mapping[int, Cut | None],
) -> Layout:
    order = {dim: splits[name] for dim, name in enumerate(out.dims) if name in splits}
    pending: dict[int | str, str] = {}
    for axis, way in enumerate(ways):
        if way.flow is not None:
            pending[axis] = way.op
        elif way.factor is not None and way.factor not in out.dims:
            op = spec.reduces.get(way.factor, "whole")
            if op != "whole":
                pending[axis] = op
    return Layout(mesh, out.shape, order, pending, cuts)


def estimate(source: Layout, target: Layout) -> float:
    """Roughly the seconds that a move takes: 0 if and only if nothing is communicated."""
    if source is target:
        return 0.0
    sizes = source.mesh.shape
    held = float(source.numel)
    for axes in source.shard_order:
        held /= math.prod(sizes[axis] for axis in axes) or 1
    seconds = 0.0
    for axis, (before, after) in enumerate(zip(source.placements, target.placements, strict=True)):
        if before == after or before.is_replicate() or sizes[axis] == 1:
            continue
        others = sizes[axis] - 1
        if before.is_shard():
            # To a pending sum nothing is sent now, but as much as to make it whole is later. A dim
            # that is cut in pieces is made whole before it is split otherwise.
            exchanged = after.is_shard() and not (source.is_cut or target.is_cut)
            moved = others / sizes[axis] if exchanged else others
        elif after.is_partial():
            continue
        else:
            moved = others / sizes[axis] * (1 if after.is_shard() else 2)
        seconds += _SECONDS_PER_COLLECTIVE + moved * held * _SECONDS_PER_ELEMENT
    if seconds == 0 and source.shard_order != target.shard_order and _reorders(source, target):
        seconds = _SECONDS_PER_COLLECTIVE + held * _SECONDS_PER_ELEMENT
    return seconds


def _reorders(source: Layout, target: Layout) -> bool:
    """Whether a dim keeps its axes but not as the outer ones in their order."""
    return any(
        before != after[: len(before)]
        for before, after in zip(source.shard_order, target.shard_order, strict=True)
    )
