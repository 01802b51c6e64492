"""The cost model: seconds, bytes and memory of moves. Planning and dispatch both use it.

*Time.* A collective takes `start + peers * alpha + bytes * beta` seconds, with the busiest rank's
figures and, over several axes, the worst alpha and beta among them (`Costs`). Plans are scored step
by step (`plan`); dispatch, which compares many strategies for one call, uses `estimate`, the same
model without looking at boxes. *Bytes*: `lower_bound`. *Memory*: `peaks`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from shardwise.comm import is_large
from shardwise.core import world
from shardwise.core.errors import ShardwiseError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.redistribute.step import (
    Sizes,
    Step,
    axes_size,
    busiest,
    mean,
    overlap,
    received,
    replicated_axes,
    rounds,
    tiles,
    volume,
)
from shardwise.redistribute.transfer import Roles, split_axes


class CostsError(ShardwiseError, ValueError):
    """A file of costs that cannot be read, or costs that are not valid."""


def _check_seconds(name: str, value: object) -> None:
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise CostsError(f"{name}: expected seconds, 0 or more; got {value!r}")


@dataclass(frozen=True)
class AxisCost:
    """Seconds per message and seconds per byte along one axis."""

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            _check_seconds(name, value)


@dataclass(frozen=True)
class Costs:
    """The costs of all axes.

    Arguments:
        axes: by axis name; `shardwise calibrate` measures them.
        default: for the axes not named.
        start: seconds that any collective takes before its first byte.

    Without arguments: 5 us a message and 10 GB/s, as between hosts with accelerators.
    """

    axes: Mapping[str, AxisCost] = field(default_factory=dict)
    default: AxisCost = AxisCost(alpha=5e-6, beta=1e-10)
    start: float = 2e-5

    def __post_init__(self) -> None:
        _check_seconds("start", self.start)
        for name, cost in self.axes.items():
            if not isinstance(name, str) or not isinstance(cost, AxisCost):
                raise CostsError(
                    f"axes: expected such as {{'tp': AxisCost(...)}}, got {self.axes!r}"
                )
        object.__setattr__(self, "axes", MappingProxyType(dict(self.axes)))
        # A key of the cache of plans: hashed at every move.
        axes = tuple(sorted(self.axes.items(), key=str))
        object.__setattr__(self, "_hash", hash((axes, self.default, self.start)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Costs, (dict(self.axes), self.default, self.start)

    def __hash__(self) -> int:
        return int(vars(self)["_hash"])

    def seconds(self, axes: Iterable[str], peers: int, bytes: int, collectives: int = 1) -> float:
        """Return the time of one step."""
        alpha, beta = self.default.alpha, self.default.beta
        if self.axes:
            costs = [self.axes.get(axis, self.default) for axis in axes] or [self.default]
            alpha = max(cost.alpha for cost in costs)
            beta = max(cost.beta for cost in costs)
        return collectives * self.start + peers * alpha + bytes * beta

    def least_seconds(self, bytes: int) -> float:
        """Return the least time of any plan in which some rank receives this many bytes."""
        if not bytes:
            return 0.0
        costs = [self.default, *self.axes.values()]
        alpha = min(cost.alpha for cost in costs)
        return self.start + alpha + bytes * min(cost.beta for cost in costs)

    def save(self, path: str | Path) -> None:
        """Write the file that `load` reads."""
        axes = {name: asdict(cost) for name, cost in self.axes.items()}
        data = {"axes": axes, "default": asdict(self.default), "start": self.start}
        try:
            Path(path).write_text(json.dumps(data, indent=2) + "\n")
        except OSError as error:
            raise CostsError(f"costs: cannot write {str(path)!r}: {error}") from error

    @staticmethod
    def load(path: str | Path) -> Costs:
        """Read a file that `save` or `shardwise calibrate` wrote."""
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise CostsError(f"costs: cannot read {str(path)!r}: {error}") from error
        try:
            axes = {name: AxisCost(**cost) for name, cost in data["axes"].items()}
            return Costs(axes, AxisCost(**data["default"]), data["start"])
        except (KeyError, TypeError, AttributeError, CostsError) as error:
            raise CostsError(
                f"costs: {str(path)!r} is not a file of costs ({type(error).__name__}: {error}); "
                "`shardwise calibrate` writes one"
            ) from error


DEFAULT = Costs()
LOOPBACK = Costs(default=AxisCost(alpha=5e-5, beta=1e-9), start=1e-4)
"""gloo between processes of one host, in round numbers."""


def as_costs(costs: Costs | str | Path | None, mesh: DeviceMesh) -> Costs:
    """Return what `costs=` stands for: costs, the path of a file of them, or those of the mesh."""
    if costs is None:
        return costs_of(mesh)
    if isinstance(costs, Costs):
        return costs
    if isinstance(costs, str | Path):
        path = Path(costs)
        stamp: Any = path.stat().st_mtime_ns if path.exists() else None
        return _load(str(path), stamp)
    raise CostsError(f"costs: expected Costs or a path, got {costs!r} ({type(costs).__name__})")


@lru_cache(maxsize=16)
def _load(path: str, stamp: object) -> Costs:
    return Costs.load(path)


# ---- the costs of a mesh

_of_meshes: WeakKeyDictionary[world.World, dict[DeviceMesh, Costs]] = WeakKeyDictionary()
"""Costs that were set, by the world of the rank that set them."""
_forget_decisions: list[Callable[[], None]] = []


def costs_of(mesh: DeviceMesh) -> Costs:
    """Return the costs that were set for a mesh, or round numbers for its type of device."""
    if _of_meshes:
        found = _of_meshes.get(world.current(start=False), {}).get(mesh)
        if found is not None:
            return found
    return LOOPBACK if mesh.device_type == "cpu" else DEFAULT


def set_costs(mesh: DeviceMesh, costs: Costs | None) -> None:
    """Use these costs for all decisions on a mesh from now on; None for the default ones.

    Every rank of the mesh must set the same costs at the same point of the program: ranks that
    decide differently deadlock. `calibrate` does so.
    """
    here = _of_meshes.setdefault(world.current(start=False), {})
    if costs is None:
        here.pop(mesh, None)
    else:
        here[mesh] = costs
    for forget in _forget_decisions:
        forget()


def when_costs_change(forget: Callable[[], None]) -> None:
    """Call `forget` on the thread that sets costs: it drops decisions made with the old ones."""
    _forget_decisions.append(forget)


# ---- estimates


class Price(NamedTuple):
    """Seconds of a collective along one axis: before the first byte, and for each byte."""

    before: float
    per_byte: float


@lru_cache(maxsize=256)
def prices(mesh: DeviceMesh, costs: Costs) -> tuple[Price, ...]:
    """Return the price of a collective along each axis."""
    found = []
    for axis, size in enumerate(mesh.shape):
        name = mesh.axis_name(axis)
        beta = costs.axes.get(name, costs.default).beta
        found.append(Price(costs.seconds((name,), size - 1, 0), beta))
    return tuple(found)


def estimate(source: Layout, target: Layout, price: Sequence[Price]) -> Price:
    """Estimate the time of a move within one mesh, axis by axis, without a plan.

    Returns a fixed time in seconds, and a time to multiply by the size of an element in bytes; both
    are 0 if nothing is communicated. The estimate equals the time of the plan where one axis
    changes and divides the tensor evenly.
    """
    if source is target:
        return _FREE
    sizes = source.mesh.shape
    held = float(source.numel)
    for axes in source.shard_order:
        for axis in axes:
            held /= sizes[axis] or 1
    latency = per_byte = 0.0
    for axis, (before, after) in enumerate(zip(source.placements, target.placements, strict=True)):
        size = sizes[axis]
        if before == after or before.is_replicate() or size == 1:
            continue
        if before.is_shard():
            # To a pending sum nothing is sent now, but as much as to make it whole is later. A
            # cut dim is made whole before it is split otherwise.
            is_exchange = after.is_shard() and not (source.is_cut or target.is_cut)
            moved = (size - 1) / size if is_exchange else size - 1
        elif after.is_partial():
            continue
        else:
            moved = (size - 1) / size * (1 if after.is_shard() else 2)
        latency += price[axis].before
        per_byte += moved * held * price[axis].per_byte
    if per_byte == 0 and latency == 0 and _reorders(source, target):
        worst = worst_price(price)
        return Price(worst.before, held * worst.per_byte)
    return Price(latency, per_byte)


_FREE = Price(0.0, 0.0)


def estimate_reduction(layout: Layout, price: Sequence[Price]) -> Price:
    """Estimate the time to complete the pending reductions of a layout, by a reduce-scatter for
    each axis."""
    if not layout.partial:
        return _FREE
    sizes = layout.mesh.shape
    held = layout.numel / axes_size(layout.mesh, split_axes(layout))
    latency = per_byte = 0.0
    for axis, _ in layout.partial:
        if sizes[axis] > 1:
            latency += price[axis].before
            per_byte += held * (sizes[axis] - 1) / sizes[axis] * price[axis].per_byte
    return Price(latency, per_byte)


def worst_price(price: Sequence[Price]) -> Price:
    """Return the highest prices among all axes, for communication whose axes are not known."""
    return Price(max(each.before for each in price), max(each.per_byte for each in price))


def communicates(source: Layout, target: Layout) -> bool:
    """Return whether a move within one mesh needs communication."""
    return estimate(source, target, [_UNIT] * source.mesh.ndim).before > 0


_UNIT = Price(1.0, 0.0)


def _reorders(source: Layout, target: Layout) -> bool:
    """Return whether some dim's axes in the source are not its outermost axes in the target."""
    return source.shard_order != target.shard_order and any(
        before != after[: len(before)]
        for before, after in zip(source.shard_order, target.shard_order, strict=True)
    )


# ---- the fewest bytes any plan can move
#
# Without pending reductions a rank must receive the elements it needs and does not hold: that
# bounds the busiest rank. With p contributions to an element that r ranks (or groups of ranks)
# need, some rank must first complete it, which takes p - 1 messages, and every other rank needs one
# more; plus one if no rank that needs it holds a contribution. That bounds the sum over all ranks,
# and so the mean.


def is_mean_bound(source: Layout, target: Layout) -> bool:
    """Return whether the bound is on the mean, not on the busiest rank."""
    return bool(_ending(source, target) or _new(source, target))


def lower_bound(source: Layout, target: Layout) -> int:
    """Return the fewest elements received: by the busiest rank or, with pending reductions, on
    average."""
    ending, new = _ending(source, target), _new(source, target)
    if not ending and not new:
        return busiest(received(source, target))
    if source.mesh is not target.mesh:
        return 0
    mesh = source.mesh
    need = volume(target)
    group = axes_size(mesh, new)  # ranks that hold together what they need
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


# ---- peak memory on the busiest rank: input, buffers and results
#
# The figures follow the execution on real ranks. The tensor a plan starts with belongs to the
# caller and lives throughout. A packed buffer may live as long as its step, as a backend frees it
# when it likes; received data live until they are put in place or reduced. A slice is a view, so it
# takes no memory until the end.


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
