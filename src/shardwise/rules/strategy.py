"""Choose the strategy of a call: how to split it with the least communication.

For each axis of the mesh a call either splits one factor (or two, if its lowering can exchange what
is then apart), or lets pending sums flow through its linear inputs, or has everything whole. Only
splits already present on an input are tried; but where an input is split along a dim that must be
whole, the axis may move to another dim of that input: an exchange in place of a gather.

Strategies are compared by the cost model (`redistribute.cost`), with the costs of the mesh and the
dtypes of the inputs. The communication of a lowering counts if its rule states it. The choice is a
function of facts that all ranks share, so all ranks choose the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import NamedTuple

from shardwise.comm import carries_values
from shardwise.core import cut as cuts_of
from shardwise.core.cut import Cut
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.redistribute.cost import (
    Price,
    costs_of,
    estimate,
    estimate_reduction,
    prices,
    worst_price,
)
from shardwise.rules.acceptable import listed_layouts
from shardwise.rules.spec import Dims, Out, Spec, SplitContext

_MOST_CHOICES = 512


class AxisStrategy(NamedTuple):
    """What a call does on one axis: split a factor, let a pending sum flow, or have all whole."""

    factor: str | None = None
    also: str | None = None
    """A second factor to split, which no result has."""
    flow: tuple[int, ...] | None = None
    """The inputs that keep their pending sum."""
    op: str = "sum"
    cut: Cut | None = None
    """The pieces of the factor's dim, if it is cut."""
    size: int | None = None
    """The size of the dim that `cut` describes, or that others are scaled to."""

    @property
    def factors(self) -> tuple[str, ...]:
        """All factors that are split."""
        return tuple(each for each in (self.factor, self.also) if each is not None)


WHOLE = AxisStrategy()


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy: how a call is split, and so the layouts of its inputs and results."""

    context: SplitContext
    used_on: tuple[tuple[int, ...], ...]
    """For each input the axes on which it is whole beside shards: its gradient on these axes is a
    contribution."""
    costs: tuple[Price, ...]
    """The estimated communication: of each input, and of the call itself. The second number of each
    is for a byte of the size of an element."""
    depends_on_dtype: bool = False
    """Whether another strategy could be cheaper for other dtypes of the inputs."""

    def seconds(self, itemsizes: Sequence[int]) -> float:
        """Return the time of its communication, for elements of these sizes."""
        return sum(
            [
                cost.before + size * cost.per_byte
                for cost, size in zip(self.costs, itemsizes, strict=True)
            ]
        )

    @property
    def inputs(self) -> tuple[Layout, ...]:
        """The layouts that the inputs must have."""
        return self.context.inputs

    @property
    def outputs(self) -> tuple[Layout, ...]:
        """The layouts of the results."""
        return self.context.outputs


def choose(
    spec: Spec, layouts: Sequence[Layout], mesh: DeviceMesh, *, keeps: Layout | None = None
) -> Strategy | None:
    """Return the cheapest strategy for a call.

    Arguments:
        spec: what the rule says.
        layouts: the current layouts of the inputs.
        mesh: their mesh.
        keeps: the layout that the first input and the first result must have (an in-place
            operator); None is returned if no strategy has it.
    """
    itemsizes = _itemsizes(spec)
    found: list[Strategy] = []
    best: Strategy | None = None
    best_rank: tuple[float, int, int] | None = None
    for made in _strategies(spec, layouts, mesh):
        if keeps is not None and not (made.inputs[0] is keeps and made.outputs[0] is keeps):
            continue
        moved = sum(a is not b for a, b in zip(layouts, made.inputs, strict=True))
        pending = sum(len(each.partial) for each in made.outputs)
        rank = (round(made.seconds(itemsizes), 12), pending, moved)
        found.append(made)
        if best_rank is None or rank < best_rank:
            best, best_rank = made, rank
            if rank == _FREE:
                return best
    if best is None or best_rank is None or not best_rank[0]:
        return best
    if any(_may_beat(best, other) for other in found):
        return replace(best, depends_on_dtype=True)
    return best


_FREE = (0.0, 0, 0)


def _strategies(spec: Spec, layouts: Sequence[Layout], mesh: DeviceMesh) -> Iterator[Strategy]:
    """Yield the possible strategies, in a fixed order."""
    price = prices(mesh, costs_of(mesh))
    if spec.acceptable is not None:
        for inputs, outputs, used_on in listed_layouts(spec, layouts, mesh):
            try:
                for layout, target in zip(layouts, inputs, strict=True):
                    _check_pending(layout, target.partial)
            except _ImpossibleError:
                continue
            context = SplitContext(mesh, {}, inputs, outputs)
            yield Strategy(context, used_on, _costs(spec, layouts, context, price))
        return
    options = [list(_options(spec, layouts, axis)) for axis in range(mesh.ndim)]
    for combination in islice(product(*options), _MOST_CHOICES):
        made = _build_if_possible(spec, layouts, mesh, combination, price)
        if made is not None:
            yield made


def _itemsizes(spec: Spec) -> tuple[int, ...]:
    """Return the bytes of an element of each input, and of what the call itself communicates: of
    its widest floating-point input, or of its widest one."""
    dtypes = [tensor.dtype for tensor, _ in spec.inputs]
    sizes = [dtype.itemsize for dtype in dtypes]
    wide = [dtype.itemsize for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    return (*sizes, max(wide or sizes, default=1))


def _may_beat(best: Strategy, other: Strategy) -> bool:
    """Return whether another strategy could be cheaper than the best one for other dtypes.

    If so, the strategy must be chosen for each dtype. Elements have 1 to 16 bytes.
    """
    gain = 0.0  # the most that the other could save
    is_equal = True
    for mine, theirs in zip(best.costs, other.costs, strict=True):
        rate = mine.per_byte - theirs.per_byte
        gain += mine.before - theirs.before + rate * (_MOST_BYTES if rate > 0 else 1)
        is_equal = is_equal and mine == theirs
    return gain > -_ROUNDING and not is_equal


_MOST_BYTES = 16
_ROUNDING = 1e-12
"""Times that differ by less are equal, but for rounding errors."""


def _options(spec: Spec, layouts: Sequence[Layout], axis: int) -> Iterator[AxisStrategy]:
    """Yield the strategies for one axis in a fixed order: first what the inputs do already."""
    seen: dict[AxisStrategy, None] = {}  # in the order in which they were found
    for position, ((_, dims), layout) in enumerate(zip(spec.inputs, layouts, strict=True)):
        for dim, (factor, axes) in enumerate(zip(dims, layout.shard_order, strict=True)):
            if axis not in axes:
                continue
            if factor is not None and _may_split(spec, factor):
                found = _splits_of(spec, factor, layout, dim)
            else:
                found = _exchanges(spec, dims, layout, axis)
            for option in found:
                if option not in seen:
                    seen[option] = None
                    yield option
        for pending, op in layout.partial:
            if pending != axis or op not in ("sum", "avg"):
                continue
            for flow in spec.linear:
                option = AxisStrategy(flow=tuple(flow), op=op)
                if position in flow and option not in seen:
                    seen[option] = None
                    yield option
    if spec.co_split and carries_values(layouts[0].mesh):
        yield from _co_splits(spec, seen)
    yield WHOLE


def _co_splits(spec: Spec, found: Collection[AxisStrategy]) -> Iterator[AxisStrategy]:
    """Yield splits of two factors at once, both of which inputs split along this axis."""
    for factor, also in spec.co_split:
        if any(option.factor == also for option in found):
            for option in found:
                if option.factor == factor:
                    yield option._replace(also=also)


def _splits_of(spec: Spec, factor: str, layout: Layout, dim: int) -> Iterator[AxisStrategy]:
    """Yield splits of a factor as in a dim of an input: with its pieces, if allowed, and
    without."""
    cut, size = layout.cuts[dim], layout.shape[dim]
    if cut is not None and _may_be_cut(spec, factor):
        yield AxisStrategy(factor, cut=cut, size=size)
    yield AxisStrategy(factor, size=size if spec.scales else None)


def _exchanges(spec: Spec, dims: Dims, layout: Layout, axis: int) -> Iterator[AxisStrategy]:
    """Yield splits of other dims of an input by an axis whose own dim must be whole."""
    sizes = layout.mesh.shape
    for factor, size, axes in zip(dims, layout.shape, layout.shard_order, strict=True):
        pieces = sizes[axis] * math.prod(sizes[each] for each in axes)
        free = factor is not None and any(factor in out.dims for out in spec.outputs)
        if free and axis not in axes and size >= pieces:
            yield AxisStrategy(factor, size=size if spec.scales else None)


def _may_be_cut(spec: Spec, factor: str) -> bool:
    """Return whether the dims of a factor may stay cut."""
    if spec.positions is None:
        return spec.lower is None and spec.allows is None
    return factor not in spec.positions


def _may_split(spec: Spec, factor: str) -> bool:
    """Return whether a factor may be split at all."""
    return factor in spec.reduces or any(factor in out.dims for out in spec.outputs)


def _build_if_possible(
    spec: Spec,
    layouts: Sequence[Layout],
    mesh: DeviceMesh,
    options: tuple[AxisStrategy, ...],
    price: Sequence[Price],
) -> Strategy | None:
    """Return the strategy that these strategies of all axes make; None if they do not fit."""
    splits: dict[str, tuple[int, ...]] = {}
    for axis, option in enumerate(options):
        for each in option.factors:
            splits[each] = (*splits.get(each, ()), axis)
    for factor, axes in splits.items():
        if len(axes) > 1:
            splits[factor] = _nesting_order(spec, layouts, factor, axes)
    if spec.allows is not None and splits and not spec.allows(splits, mesh):
        return None
    try:
        return _build(spec, layouts, mesh, options, splits, price)
    except _ImpossibleError:
        return None


class _ImpossibleError(Exception):
    """An impossible strategy: a boundary between indices or within a unit, or a pending reduction
    that would become another, as a maximum a sum."""


class _Cuts:
    """The pieces of the dims of split factors."""

    def __init__(
        self,
        spec: Spec,
        mesh: DeviceMesh,
        splits: Mapping[str, tuple[int, ...]],
        options: Sequence[AxisStrategy],
    ) -> None:
        self.spec = spec
        self.counts = {
            factor: tuple(mesh.shape[axis] for axis in axes) for factor, axes in splits.items()
        }
        self.given: dict[str, tuple[Cut, int]] = {}
        """The pieces that the inputs have, and the size of their dim; only of cut dims."""
        # Segmented dims first: their pieces count.
        for option in sorted(options, key=lambda option: option.cut is None):
            if option.factor is not None and option.size is not None:
                cut = option.cut or ((option.size, 1),)
                self.given.setdefault(option.factor, (cut, option.size))

    def of_inputs(self, dims: Dims, shape: Sequence[int]) -> tuple[Cut | None, ...] | None:
        """Return the pieces of each dim of an input; None if no input is cut."""
        if not self.given:
            return None
        return tuple(map(self._scaled, dims, shape))

    def of_output(self, number: int, dims: Dims, shape: Sequence[int]) -> dict[int, Cut | None]:
        """Return the pieces of a result's dims, by dim."""
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
                    raise _ImpossibleError
        return found

    def _scaled(self, factor: str | None, size: int) -> Cut | None:
        if factor is None or factor not in self.given:
            return None
        cut, known = self.given[factor]
        if size == known:
            return cut
        made = cuts_of.rescale_cut(cut, size, self.counts[factor]) if self.spec.scales else None
        if made is None:
            raise _ImpossibleError
        return made


def _build(
    spec: Spec,
    layouts: Sequence[Layout],
    mesh: DeviceMesh,
    options: tuple[AxisStrategy, ...],
    splits: dict[str, tuple[int, ...]],
    price: Sequence[Price],
) -> Strategy:
    """Return the layouts and costs of a strategy; raise `_TornError` if it is impossible."""
    cuts = _Cuts(spec, mesh, splits, options)
    targets, used = [], []
    for position, ((_, dims), layout) in enumerate(zip(spec.inputs, layouts, strict=True)):
        order = tuple(splits.get(each, ()) if each is not None else () for each in dims)
        pending: list[tuple[int, str]] = []
        beside: list[int] = []
        for axis, option in enumerate(options):
            if option.flow is not None:
                if position in option.flow:
                    pending.append((axis, option.op))
                elif mesh.shape[axis] > 1:
                    beside.append(axis)
            elif option.factor is not None and not any(each in dims for each in option.factors):
                if position in spec.additive and spec.reduces.get(option.factor) == "sum":
                    pending.append((axis, "sum"))
                elif mesh.shape[axis] > 1:
                    beside.append(axis)
        _check_pending(layout, pending)
        pieces = cuts.of_inputs(dims, layout.shape)
        targets.append(_with_splits(layout, order, tuple(pending), pieces))
        used.append(tuple(beside))
    outputs = tuple(
        _output(spec, mesh, out, splits, options, cuts.of_output(number, out.dims, out.shape))
        for number, out in enumerate(spec.outputs)
    )
    context = SplitContext(mesh, splits, tuple(targets), outputs)
    return Strategy(context, tuple(used), _costs(spec, layouts, context, price))


def _costs(
    spec: Spec, layouts: Sequence[Layout], context: SplitContext, price: Sequence[Price]
) -> tuple[Price, ...]:
    """Return the estimated communication: of each input, and of the call itself."""
    costs = [
        estimate(layout, target, price)
        for layout, target in zip(layouts, context.inputs, strict=True)
    ]
    moves_inputs = any(each.before or each.per_byte for each in costs)
    return (*costs, _own_cost(spec, context, price, moves_inputs))


def _own_cost(
    spec: Spec, context: SplitContext, price: Sequence[Price], moves_inputs: bool
) -> Price:
    """Estimate the communication of the call itself: that of its lowering, and the reduction of
    pending results. A pending result must be reduced some day, but this counts only against other
    communication: alone it is what the program asks for."""
    before = per_byte = 0.0
    if spec.comm_cost is not None:
        collectives, elements = spec.comm_cost(context)
        worst = worst_price(price)
        before, per_byte = collectives * worst.before, elements * worst.per_byte
    if moves_inputs or before or per_byte:
        for layout in context.outputs:
            later = estimate_reduction(layout, price)
            before, per_byte = before + later.before, per_byte + later.per_byte
    return Price(before, per_byte)


def _check_pending(layout: Layout, wanted: Sequence[tuple[int, str]]) -> None:
    """Check that no pending reduction of an input must become one of another kind."""
    pending = dict(layout.partial)
    for axis, op in wanted:
        ops = {op, pending.get(axis, op)}
        if len(ops) > 1 and ops != {"sum", "avg"}:
            raise _ImpossibleError


def _with_splits(
    layout: Layout,
    order: tuple[tuple[int, ...], ...],
    pending: tuple[tuple[int, str], ...],
    cuts: tuple[Cut | None, ...] | None = None,
) -> Layout:
    """Return the layout with this order, these pending reductions and pieces."""
    cuts = (None,) * layout.ndim if cuts is None else cuts
    if layout.shard_order == order and layout.partial == pending and layout.cuts == cuts:
        return layout
    return layout.relaid(order, dict(pending), cuts)


def _nesting_order(
    spec: Spec, layouts: Sequence[Layout], factor: str, axes: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the axes that split a factor, in the order in which the largest input nests them."""
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
    options: tuple[AxisStrategy, ...],
    cuts: Mapping[int, Cut | None],
) -> Layout:
    order = {dim: splits[name] for dim, name in enumerate(out.dims) if name in splits}
    pending: dict[int | str, str] = {}
    for axis, option in enumerate(options):
        if option.flow is not None:
            pending[axis] = option.op
        elif option.factor is not None and option.factor not in out.dims:
            op = spec.reduces.get(option.factor, "whole")
            if op != "whole":
                pending[axis] = op
    return Layout(mesh, out.shape, order, pending, cuts)
