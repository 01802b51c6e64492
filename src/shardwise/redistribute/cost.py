"""The cost model: seconds and bytes of moves. Planning and dispatch both use it.

*Time.* A collective takes `start + peers * alpha + bytes * beta` seconds, with the busiest rank's
figures and, over several axes, the worst alpha and beta among them (`Costs`). Plans are scored step
by step (`plan`); dispatch, which compares many strategies for one call, uses `estimate`, the same
model without looking at boxes. `calibrate` measures the costs. *Bytes*: `lower_bound`.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from shardwise.comm import Communicator, communicator
from shardwise.core import world
from shardwise.core.errors import ShardwiseError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Shard
from shardwise.redistribute.step import (
    axes_size,
    busiest,
    mean,
    overlap,
    received,
    replicated_axes,
    volume,
)
from shardwise.redistribute.transfer import split_axes


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

    def least_seconds(self, bytes: float) -> float:
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
        if isinstance(before, Shard):
            if isinstance(after, Shard) and before.without_order() == after.without_order():
                continue  # only the order of axes may differ; see below
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


def lower_bound(source: Layout, target: Layout) -> float:
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
        return mean(missing) / group * _BELOW
    copies = axes_size(mesh, replicated_axes(target))
    contributions = axes_size(mesh, ending)
    messages = need * (contributions - 1 + copies - 1) + missing
    return mean(messages) / copies / group * _BELOW


_BELOW = 1 - 1e-12
"""A mean may be rounded up by less than this, and a bound must not be."""


def _ending(source: Layout, target: Layout) -> list[int]:
    kept = {axis for axis, _ in target.partial} if source.mesh is target.mesh else set()
    return [axis for axis, _ in source.partial if axis not in kept and source.mesh.shape[axis] > 1]


def _new(source: Layout, target: Layout) -> list[int]:
    already = {axis for axis, _ in source.partial} if source.mesh is target.mesh else set()
    return [
        axis for axis, _ in target.partial if axis not in already and target.mesh.shape[axis] > 1
    ]


# ---- measure the costs

_TINY, _LARGE = 8, 1 << 22
"""Bytes to each peer: few, to measure latency, and many, to measure bandwidth."""


def calibrate(mesh: DeviceMesh, *, repeats: int = 20) -> Costs:
    """Measure the latency and bandwidth of every axis; all ranks of the mesh call it together.

    Each axis is timed with an all-to-all along it, all its groups at once as in a real program. The
    slowest rank counts, and every rank gets the same result. From then on moves and operators on
    this mesh are planned with these costs.

    Arguments:
        repeats: how often each size is timed; the median counts.
    """
    if repeats < 1:
        raise CostsError(f"repeats: expected at least 1, got {repeats}")
    everybody = communicator(mesh)
    tiny, large = {}, {}
    for axis in range(mesh.ndim):
        if mesh.shape[axis] > 1:
            group, name = communicator(mesh, axis), mesh.axis_name(axis)
            tiny[name] = _seconds(group, everybody, mesh.device_type, _TINY, repeats)
            large[name] = _seconds(group, everybody, mesh.device_type, _LARGE, repeats)
    # One size of group cannot tell the start of a collective from its messages: assume half.
    start = min(tiny.values(), default=2 * LOOPBACK.start) / 2
    sizes = {mesh.axis_name(axis): mesh.shape[axis] for axis in range(mesh.ndim)}
    axes = {
        name: AxisCost(
            alpha=(tiny[name] - start) / (sizes[name] - 1),
            beta=max(0.0, large[name] - tiny[name]) / (_LARGE * (sizes[name] - 1)),
        )
        for name in tiny
    }
    costs = Costs(axes, LOOPBACK.default, start)
    set_costs(mesh, costs)
    return costs


def _seconds(
    group: Communicator, everybody: Communicator, device: str, bytes: int, repeats: int
) -> float:
    """Return the median time of an all-to-all on the slowest rank, after warm-up."""
    pieces = [torch.zeros(bytes, dtype=torch.uint8, device=device) for _ in range(group.size)]
    times = []
    for repeat in range(repeats + 3):
        everybody.barrier()
        begin = time.perf_counter()
        group.all_to_all(pieces)
        if repeat >= 3:
            times.append(time.perf_counter() - begin)
    slowest = everybody.all_reduce(torch.tensor(statistics.median(times), device=device), "max")
    return float(slowest)
