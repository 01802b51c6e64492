"""Plans: the steps from one layout to another, chosen by their cost. Pure and cached."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from shardwise.core.checks import as_int
from shardwise.core.errors import LayoutError, ShardwiseError
from shardwise.core.layout import Layout
from shardwise.core.placement import Partial, Placement, Replicate, Shard, _StridedShard
from shardwise.redistribute import step as steps
from shardwise.redistribute.candidates import (
    as_steps,
    cheapest_chain,
    cross_mesh_paths,
    ending_axes,
    new_axes,
    paths,
    pending_op,
    rescaled,
)
from shardwise.redistribute.cost import (
    DEFAULT,
    LOOPBACK,
    Costs,
    as_costs,
    is_mean_bound,
    lower_bound,
)
from shardwise.redistribute.cut_dims import stages
from shardwise.redistribute.memory import peaks
from shardwise.redistribute.step import Step


class MemoryCapError(ShardwiseError, ValueError):
    """No plan stays within the given peak memory."""


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One step of a plan, in bytes and seconds."""

    kind: str
    axes: tuple[str, ...]
    source: Layout
    target: Layout
    bytes_received: int
    """By the busiest rank."""
    mean_bytes: float
    """Received by a rank on average."""
    peers: int
    """The number of ranks that a rank receives from."""
    peak_bytes: int
    """Held at once by the busiest rank: the plan's input, buffers and results."""
    seconds: float
    """Its time by the cost model."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How to get a tensor from one layout to another. `plan_redistribute` makes it."""

    source: Layout
    target: Layout
    dtype: torch.dtype
    moves: tuple[Step, ...]
    """The steps that are executed."""
    steps: tuple[PlanStep, ...]
    """The same steps, in bytes and seconds."""
    lower_bound: float
    """Bytes that any plan receives: on the busiest rank or, with pending sums, on average."""
    costs: Costs

    @property
    def bytes_received(self) -> int:
        """The bytes that the busiest rank receives."""
        return sum(step.bytes_received for step in self.steps)

    @property
    def mean_bytes(self) -> float:
        """The bytes that a rank receives on average."""
        return sum(step.mean_bytes for step in self.steps)

    @property
    def peak_bytes(self) -> int:
        """The bytes that the busiest rank holds at once."""
        return max((step.peak_bytes for step in self.steps), default=0)

    @property
    def seconds(self) -> float:
        """Its time by the cost model."""
        return sum(step.seconds for step in self.steps)

    def transpose(self) -> Plan:
        """Return the plan of the gradient: from the dual of the target to that of the source."""
        return plan_redistribute(
            gradient_layout(self.target), gradient_layout(self.source), self.dtype, costs=self.costs
        )

    def explain(self) -> str:
        """Describe the steps and their costs in a few lines."""
        title = f"{self.source!r} -> {self.target!r}, {self.dtype}"
        if not self.steps:
            return f"{title}: nothing to do"
        lines = [title]
        for number, step in enumerate(self.steps, 1):
            over = f" over {'.'.join(step.axes)}" if step.axes else ""
            if step.kind in steps.COLLECTIVES:
                cost = (
                    f"each rank receives up to {_amount(step.bytes_received)} "
                    f"from {step.peers} peer{'s' * (step.peers != 1)}, "
                    f"about {step.seconds * 1e6:.0f} us"
                )
            else:
                cost = "no communication"
            lines.append(f"  {number}. {step.kind}{over} -> {step.target!r}: {cost}")
        lines.append(f"  {self._verdict()} Peak memory {_amount(self.peak_bytes)}.")
        return "\n".join(lines)

    def _verdict(self) -> str:
        """Compare the bytes received with the lower bound."""
        is_mean = is_mean_bound(self.source, self.target)
        received = self.mean_bytes if is_mean else self.bytes_received
        total = f"Total: the busiest rank receives {_amount(self.bytes_received)}"
        if is_mean and received < self.bytes_received:
            total += f", a rank on average {_amount(received)}"
        if received and not self.lower_bound:
            return f"{total}. No lower bound is known."
        ratio = round(received / self.lower_bound, 9) if received else 1.0
        compared = (
            "which the plan meets" if ratio < 1.005 else f"the plan takes {ratio:.2f} times that"
        )
        if ratio > 1.02:
            compared += ", as fewer messages or a lighter busiest rank make it faster"
        whose = "average" if is_mean else "busiest"
        return (
            f"{total}. Lower bound for the {whose} rank: {_amount(self.lower_bound)}, {compared}."
        )

    def __repr__(self) -> str:
        path = ", ".join(
            step.kind + (f"@{'.'.join(step.axes)}" if step.axes else "") for step in self.steps
        )
        return (
            f"Plan({self.source!r} -> {self.target!r}: {path or 'nothing'}; "
            f"{_amount(self.bytes_received)} of at least {_amount(self.lower_bound)})"
        )


def plan_redistribute(
    src: Layout,
    dst: Layout,
    dtype: torch.dtype = torch.float32,
    *,
    peak_bytes: int | None = None,
    costs: Costs | str | Path | None = None,
) -> Plan:
    """Plan the move of a tensor from one layout to another with the least communication.

    Nothing is communicated here. The plan is a function of its arguments and of the costs of the
    mesh, which are the same on all ranks, so all ranks choose the same.

    Arguments:
        src: the current layout.
        dst: the target layout; on the same mesh, or on another of the same world.
        dtype: of the tensor.
        peak_bytes: the most memory a rank may hold at once for it.
        costs: what communication costs: `Costs`, or a file that `shardwise calibrate` wrote. By
            default what `calibrate` measured on the mesh, or else round numbers.

    Example:
        >>> mesh = DeviceMesh.abstract((4, 8), ("dp", "tp"))
        >>> src = Layout.parse("[4096@dp, 4096]", mesh)
        >>> print(plan_redistribute(src, Layout.parse("[4096@tp, 4096]", mesh)).explain())
    """
    check_arguments(src, dst, dtype)
    if peak_bytes is not None and as_int(peak_bytes) is None:
        raise MemoryCapError(f"peak_bytes: expected a number of bytes, got {peak_bytes!r}")
    model = planning_costs(costs, src, dst)
    if src.is_cut or dst.is_cut:
        return _plan_cut(src, dst, dtype, peak_bytes, model, src.mesh.get_coordinate())
    return _plan(src, dst, dtype, peak_bytes, model)


def planning_costs(costs: Costs | str | Path | None, src: Layout, dst: Layout) -> Costs:
    """Return the costs to plan with.

    Between two meshes, costs that were set for one mesh do not count, because the ranks of the
    other may not know them.
    """
    if costs is None and src.mesh is not dst.mesh:
        return LOOPBACK if src.mesh.device_type == "cpu" else DEFAULT
    return as_costs(costs, src.mesh)


def with_placements(source: Layout, placements: Sequence[Placement]) -> Layout:
    """Return the layout of the same tensor on the same mesh with these placements."""
    if _PLACEMENTS.issuperset(map(type, placements)):
        return _placed(source, tuple(placements))
    return Layout.from_placements(source.mesh, source.shape, placements)


_PLACEMENTS = frozenset({Shard, _StridedShard, Replicate, Partial})


@lru_cache(maxsize=4096)
def _placed(source: Layout, placements: tuple[Placement, ...]) -> Layout:
    return Layout.from_placements(source.mesh, source.shape, placements)


def check_arguments(src: object, dst: object, *dtypes: object) -> None:
    """Check that `src` and `dst` are layouts, and the rest dtypes or None."""
    for name, layout in (("src", src), ("dst", dst)):
        if not isinstance(layout, Layout):
            raise LayoutError(
                f"{name}: expected a Layout, got {layout!r} ({type(layout).__name__})"
            )
    for dtype in dtypes:
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise LayoutError(f"dtype: expected such as torch.bfloat16, got {dtype!r}")


_MODEL_ERROR = 1.02
"""Plans whose times differ by less count as equally fast; the fewest collectives win then."""
_MOST_STATES = 24
"""The most layouts that the search for a chain looks at, so that it takes below a millisecond. On
meshes of three axes and more it may miss better chains for small tensors."""


@lru_cache(maxsize=65536)
def _plan(
    src: Layout, dst: Layout, dtype: torch.dtype, peak_bytes: int | None, costs: Costs
) -> Plan:
    _check(src, dst)
    size = dtype.itemsize

    def seconds(step: Step) -> float:
        if not step.communicates:
            return 0.0
        received = step.received * size
        return costs.seconds(step.axis_names, step.peers, received, steps.collectives(step))

    least = lower_bound(src, dst) * size
    found = _candidates(src, dst, seconds, costs, least, size, first_good=peak_bytes is None)
    if peak_bytes is not None:
        found = _within(found, peak_bytes, dtype, f"{src!r} -> {dst!r} in {dtype}")
    fastest = min(time for time, _ in found)
    near = [each for each in found if each[0] <= fastest * _MODEL_ERROR]
    _, best = min(near, key=_preference)
    in_bytes = tuple(
        _in_bytes(step, size, held, seconds(step))
        for step, held in zip(best, peaks(best, dtype), strict=True)
    )
    return Plan(src, dst, dtype, tuple(best), in_bytes, least, costs)


@lru_cache(maxsize=65536)
def _plan_cut(
    src: Layout,
    dst: Layout,
    dtype: torch.dtype,
    peak_bytes: int | None,
    costs: Costs,
    place: tuple[int, ...] | None,
) -> Plan:
    """Return the plan of the rank at `place` for layouts with cut dims.

    Where a cut dim keeps its split, the ranks with the same share of it have their own plan.
    """
    _check(src, dst)
    moves: list[Step] = []
    in_bytes: list[PlanStep] = []
    least = 0.0
    parts = stages(src, dst, place)
    for stage in parts:
        step = stage.step
        if step is None:
            part = _plan(stage.source, stage.target, dtype, peak_bytes, costs)
            moves += part.moves
            in_bytes += part.steps
            least = part.lower_bound if len(parts) == 1 else 0
            continue
        first = (0,) * step.source.mesh.ndim
        held = sum(math.prod(each.local_shape(first)) for each in (step.source, step.target))
        received = step.received * dtype.itemsize
        seconds = 0.0
        if step.communicates:
            seconds = costs.seconds(step.axis_names, step.peers, received, 1)
        moves.append(step)
        in_bytes.append(_in_bytes(step, dtype.itemsize, held * dtype.itemsize, seconds))
        if peak_bytes is not None and held * dtype.itemsize > peak_bytes:
            raise MemoryCapError(
                f"peak_bytes: {src!r} -> {dst!r} in {dtype} holds {held * dtype.itemsize} bytes "
                f"where its pieces are put in order, got {peak_bytes}"
            )
    return Plan(src, dst, dtype, tuple(moves), tuple(in_bytes), least, costs)


Timed = list[tuple[float, list[Step]]]


def _preference(timed: tuple[float, list[Step]]) -> tuple[int, float, float, int]:
    """Return the sort key among equally fast plans: collectives, time, bytes, steps."""
    time, path = timed
    moved = sum(step.mean_received for step in path)
    return sum(map(steps.collectives, path)), time, moved, len(path)


def _candidates(
    src: Layout,
    dst: Layout,
    seconds: Callable[[Step], float],
    costs: Costs,
    least: float,
    size: int,
    first_good: bool,
) -> Timed:
    """Return candidates with their times; only one if nothing can be better."""
    if src.mesh is not dst.mesh:
        return [(sum(map(seconds, path)), path) for path in cross_mesh_paths(src, dst)]
    found: Timed = []
    goal = costs.least_seconds(least)
    fastest = math.inf
    for path in paths(src, dst):
        at_least = costs.least_seconds(size * sum(step.received for step in path))
        if first_good and at_least > fastest * _MODEL_ERROR:
            continue  # too slow, whatever its peers
        found.append((sum(map(seconds, path)), path))
        fastest = min(fastest, found[-1][0])
        good = found[-1][0] <= goal * _MODEL_ERROR and sum(map(steps.collectives, path)) <= 1
        if good and first_good:
            return found
    chains = _chains(src, dst, size, costs, fastest, goal)
    return found + [(sum(map(seconds, chain)), chain) for chain in chains]


def _chains(
    src: Layout, dst: Layout, size: int, costs: Costs, limit: float, least: float
) -> list[list[Step]]:
    """Return the cheapest chain of one-axis moves that takes less than `limit`, if there is one."""
    if limit <= least or new_axes(src, dst) or rescaled(src, dst) is not src:
        return []
    ending = ending_axes(src, dst)
    chain = cheapest_chain(src, dst, ending, costs, size, limit, _MOST_STATES)
    return [] if chain is None else [as_steps(src, chain, pending_op(src, ending))]


def _within(found: Timed, peak_bytes: int, dtype: torch.dtype, what: str) -> Timed:
    """Return the candidates that hold at most `peak_bytes`."""
    needed = [max(peaks(path, dtype), default=0) for _, path in found]
    allowed = [each for each, most in zip(found, needed, strict=True) if most <= peak_bytes]
    if not allowed:
        raise MemoryCapError(
            f"peak_bytes: {what} takes at least {min(needed)} bytes with every plan known, "
            f"got {peak_bytes}"
        )
    return allowed


def gradient_layout(layout: Layout) -> Layout:
    """Return the layout of the gradient: pending sums become whole, the rest stays."""
    return layout.relaid(partial={}) if layout.partial else layout


def _check(src: Layout, dst: Layout) -> None:
    if src.shape != dst.shape:
        raise LayoutError(
            f"dst: expected a layout of the global shape of src, {src.shape}; got {dst.shape}"
        )
    if src.mesh.is_abstract != dst.mesh.is_abstract or src.mesh.device_type != dst.mesh.device_type:
        raise LayoutError(
            f"dst: expected a mesh of the same world as {src.mesh!r}, got {dst.mesh!r}"
        )


def _in_bytes(step: Step, itemsize: int, peak_bytes: int, seconds: float) -> PlanStep:
    return PlanStep(
        step.kind,
        step.axis_names,
        step.source,
        step.target,
        step.received * itemsize,
        step.mean_received * itemsize,
        step.peers,
        peak_bytes,
        seconds,
    )


def _amount(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError("the loop returns")
