"""Execution: run a plan on the calling rank's piece of a tensor."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch

from shardwise.comm import Communicator, Pending, communicator, is_large, trace
from shardwise.comm.reduction import check_reduction, reduce_contributions
from shardwise.comm.trace import current_cause, trace_scope
from shardwise.core import world
from shardwise.core.box import Box
from shardwise.core.cut import take_ranges
from shardwise.core.errors import LayoutError, MeshError
from shardwise.core.layout import Layout
from shardwise.redistribute.cut_dims import in_order
from shardwise.redistribute.plan import Plan
from shardwise.redistribute.step import Step, collectives
from shardwise.redistribute.transfer import (
    Ownership,
    Parts,
    Swap,
    Transfer,
    assemble,
    receives,
    sends,
)
from shardwise.torch_internals import is_zero_tensor, storage_id


def execute(plan: Plan, local: torch.Tensor, starts_all: bool = False) -> Pending[torch.Tensor]:
    """Start a plan; the result is this rank's piece in the target layout.

    The first collective has started when this returns; later ones start when it is waited for.
    Plans of several collectives are finished in the order they were started, whichever is waited
    for first: so ranks that wait in different orders still meet in the same collectives.

    Arguments:
        starts_all: whether all collectives have started when this returns, so that it does not
            matter when, or whether, a rank waits. Only the last one is then under way.
    """
    place = check_local(local, plan.source)
    if plan.moves and (is_zero_tensor(local) or local.is_conj() or local.is_neg()):
        # torch's zeros without memory, and conjugations not yet applied, cannot be sent.
        local = local.clone()
    if len(plan.moves) == 1 and place is not None and not trace.listeners:
        (step,) = plan.moves
        if step.kind in _MAKES_NEW:
            return _RUN[step.kind](step, local)
        if step.kind == "slice" and step.source is plan.source and not step.target.is_cut:
            kept = _kept_part(step, local, place)
            return Pending.done(kept.clone(memory_format=torch.contiguous_format))
    running = _Running(plan, local)
    counts = [collectives(step) for step in plan.moves]
    if sum(counts) <= 1:
        return Pending(running.finish)
    if starts_all:
        if max(counts) > 1:  # a step of two collectives starts the second when it is waited for
            running.finish()
        else:
            running.start_last()
        return Pending(running.finish)
    unfinished: list[_Running] = world.current().unfinished
    unfinished.append(running)

    def finish() -> torch.Tensor:
        while running in unfinished:
            unfinished.pop(0).finish()
        return running.finish()

    return Pending(finish)


class _Running:
    """A plan that was started on this rank."""

    def __init__(self, plan: Plan, local: torch.Tensor) -> None:
        self._local = local
        self._left = list(plan.moves)
        self._result: torch.Tensor | None = None
        self._cause = current_cause() if trace.listeners else None
        while self._left and not self._left[0].communicates:
            local = self._start(self._left.pop(0), local).wait()
        self._under_way = (
            self._start(self._left.pop(0), local) if self._left else Pending.done(local)
        )
        self._moved = bool(plan.moves)

    def start_last(self) -> None:
        """Run the steps up to the last collective, which is then under way."""
        while any(step.communicates for step in self._left):
            self._under_way = self._start(self._left.pop(0), self._under_way.wait())

    def finish(self) -> torch.Tensor:
        """Run the remaining steps once, and return the result."""
        if self._result is None:
            result = self._under_way.wait()
            del self._under_way  # its result is freed while the other steps run
            while self._left:
                result = self._start(self._left.pop(0), result).wait()
            if self._moved and _share_memory(result, self._local):
                result = result.clone(memory_format=torch.contiguous_format)
            self._result = result.contiguous()
        return self._result

    def _start(self, step: Step, local: torch.Tensor) -> Pending[torch.Tensor]:
        if self._cause is None:
            return _start(step, local)
        operator = self._cause.operator or "redistribute"
        with trace_scope(replace(self._cause, operator=operator, target=step.target)):
            return _start(step, local)


def _share_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    one, other = x.untyped_storage(), y.untyped_storage()
    if x.is_meta:  # without data all addresses are equal
        return bool(storage_id(one) == storage_id(other))
    return one.data_ptr() == other.data_ptr()


def _start(step: Step, local: torch.Tensor) -> Pending[torch.Tensor]:
    mesh = step.source.mesh
    if mesh is step.target.mesh and mesh.get_coordinate() is None:
        return Pending.done(local)  # a move between two meshes has steps within one of them
    return _RUN[step.kind](step, local)


def check_local(local: torch.Tensor, layout: Layout) -> tuple[int, ...] | None:
    """Check the shape of this rank's piece; return the place of this rank on the mesh."""
    place = layout.mesh.get_coordinate()
    if place is None:
        return None  # this rank has no piece; the tensor only tells the dtype
    expected = _local_shape(layout, place)
    if local.shape != expected:
        raise LayoutError(
            f"local: expected shape {expected}, rank {layout.mesh.get_rank()}'s piece of "
            f"{layout!r} at {place}; got {tuple(local.shape)}"
        )
    return place


@lru_cache(maxsize=4096)
def _local_shape(layout: Layout, place: tuple[int, ...]) -> tuple[int, ...]:
    return layout.local_shape(place)


def _box(layout: Layout) -> Box | None:
    place = layout.mesh.get_coordinate()
    return None if place is None else layout.box(place)


def _slice(step: Step, local: torch.Tensor) -> Pending[torch.Tensor]:
    """Replicate -> Shard: keep a part of the local tensor. Backward: all-gather."""
    if step.target.is_cut:
        for dim, cut in enumerate(step.target.cuts):
            if cut is not None:  # and whole in the source
                local = take_ranges(local, dim, step.target.ranges(dim))
        return Pending.done(local)
    place = step.source.mesh.get_coordinate()
    assert place is not None, "a rank outside takes no part"
    return Pending.done(_kept_part(step, local, place))


def _kept_part(step: Step, local: torch.Tensor, place: tuple[int, ...]) -> torch.Tensor:
    """Return the part of the local tensor that a slice keeps, as a view."""
    slices, shape = _kept_slices(step.source, step.target, place)
    return local.new_empty(shape) if slices is None else local[slices]


@lru_cache(maxsize=4096)
def _kept_slices(
    source: Layout, target: Layout, place: tuple[int, ...]
) -> tuple[tuple[slice, ...] | None, tuple[int, ...]]:
    """Return the slices of the local tensor that a slice step keeps, and the shape of that part.

    An empty part may lie outside the local tensor, and has no slices.
    """
    before, after = source.box(place), target.box(place)
    return None if after.is_empty else after.within(before).slices, after.shape


def _scale(step: Step, local: torch.Tensor) -> Pending[torch.Tensor]:
    """Turn pending averages into pending sums, or the reverse. Backward: the same factor."""
    check_reduction("avg", local.dtype)
    factor = 1.0
    wanted = dict(step.target.partial)
    for axis, op in step.source.partial:
        size = step.source.mesh.shape[axis]
        if (op, wanted[axis]) == ("avg", "sum"):
            factor /= size
        elif (op, wanted[axis]) == ("sum", "avg"):
            factor *= size
    return Pending.done(local * factor)


def _contribution(step: Step, frame: Box, parts: Parts, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor in `frame` with these parts, and the neutral element elsewhere."""
    pending = dict(step.source.partial)
    new = [(axis, op) for axis, op in step.target.partial if axis not in pending]
    factor = math.prod(step.target.mesh.shape[axis] for axis, op in new if op == "avg")
    if factor == 1 and len(parts) == 1 and parts[0][0] == frame:
        return parts[0][1].clone(memory_format=torch.contiguous_format)
    result = like.new_full(frame.shape, _neutral(new[0][1], like.dtype))
    for box, part in parts:
        result[box.within(frame).slices] = part if factor == 1 else part * factor
    return result


def _zero_fill(step: Step, local: torch.Tensor) -> Pending[torch.Tensor]:
    """Replicate or Shard -> Partial: keep the local part, and the neutral element elsewhere.
    Backward: nothing, or slice."""
    before, after = step.source.box(), step.target.box()
    place = step.target.mesh.get_coordinate()
    assert place is not None, "a rank outside takes no part"
    pending = dict(step.source.partial)
    split = {axis for axes in step.source.shard_order for axis in axes}
    # Where several ranks hold the same elements, the first of them contributes these.
    whole = [axis for axis, _ in step.target.partial if axis not in pending and axis not in split]
    keep = all(place[axis] == 0 for axis in whole)
    common = before.intersect(after)
    part = local[common.within(before).slices]
    return Pending.done(_contribution(step, after, [(common, part)] if keep else [], local))


def _neutral(op: str, dtype: torch.dtype) -> float | int | bool:
    """Return the element that does not change a reduction."""
    if op in ("sum", "avg"):
        return 0
    if op == "product":
        return 1
    if dtype is torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max


def _all_reduce(step: Step, local: torch.Tensor) -> Pending[torch.Tensor]:
    """Partial -> Replicate. Backward: nothing."""
    return communicator(step.source.mesh, step.axes).all_reduce_async(local, step.op)


def _all_gather(step: Step, local: torch.Tensor) -> Pending[torch.Tensor]:
    """Shard -> Replicate. Backward: slice."""
    group = communicator(step.source.mesh, step.axes)
    lengths = _lengths(step.source, step.axes, step.dim, step.source.mesh.get_coordinate() or ())
    pending = group.all_gather_async(local, step.dim, lengths)
    if step.source.cuts[step.dim] is None:
        return pending
    order = in_order(step.source, step.dim)
    return pending.then(lambda whole: take_ranges(whole, step.dim, order))


def _reduce_scatter(step: Step, local: torch.Tensor) -> Pending[torch.Tensor]:
    """Partial -> Shard. Backward: all-gather."""
    group = communicator(step.source.mesh, step.axes)
    lengths = _lengths(step.target, step.axes, step.dim, step.source.mesh.get_coordinate() or ())
    return group.reduce_scatter_async(local, step.dim, lengths, step.op)


@lru_cache(maxsize=4096)
def _lengths(
    pieces: Layout, axes: tuple[int, ...], dim: int, own: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the lengths along a dim of the pieces of all ranks along these axes, in order; `own`
    is the place of this rank."""
    sizes = pieces.mesh.shape
    place = list(own)
    lengths = []
    for index in range(math.prod(sizes[axis] for axis in axes)):
        for axis in reversed(axes):
            index, place[axis] = divmod(index, sizes[axis])
        lengths.append(pieces.local_shape(place)[dim])
    return tuple(lengths)


def _exchange(step: Step, local: torch.Tensor) -> Pending[torch.Tensor]:
    """Any Shard -> any Shard. Backward: the transposed exchange."""
    source, target = step.source, step.target
    rank = source.mesh.get_rank()
    group = _group(step)
    if source.mesh is not target.mesh:
        _agree_on_dtype(group, local)
    before, after = _box(source), _box(target)
    swap = Swap(group, rank, sends(source, target, rank), receives(source, target, rank))
    if is_large(step.received * local.itemsize):  # a global fact: all ranks choose alike
        return swap.in_place(local, before, after)

    def finish(parts: Parts) -> torch.Tensor:
        return local.new_empty(0) if after is None else assemble(after, parts, local)

    return swap.of_slices(local, before).then(finish)


def _agree_on_dtype(group: Communicator, local: torch.Tensor) -> None:
    """Check that all ranks pass one dtype: a rank outside the source mesh may pass a wrong one."""
    if local.is_meta:
        return
    code = zlib.crc32(str(local.dtype).encode())
    codes = group.all_gather(torch.tensor([code], device=local.device)).tolist()
    others = [group.ranks[index] for index, other in enumerate(codes) if other != code]
    if others:
        raise LayoutError(
            f"local: expected one dtype on all ranks, got {local.dtype} here and another on ranks "
            f"{others}; a rank outside the source mesh passes an empty tensor of the same dtype"
        )


def _reduce_exchange(step: Step, local: torch.Tensor) -> Pending[torch.Tensor]:
    """Partial -> any Shard or Replicate. Backward: a move without reductions."""
    mesh = step.source.mesh
    place = mesh.get_coordinate()
    assert place is not None, "reductions take place within one mesh"
    rank = mesh.get_rank()
    ownership = Ownership(step.source, step.target, place)
    before, after = step.source.box(place), step.target.box(place)
    group = communicator(mesh, step.axes)
    first = Swap(group, rank, ownership.sends(), ownership.receives())

    def finish(contributions: Parts) -> torch.Tensor:
        pieces: dict[Box, list[torch.Tensor]] = {}
        for box, piece in contributions:
            pieces.setdefault(box, []).append(piece)
        owned = {box: reduce_contributions(each, step.op) for box, each in pieces.items()}
        parts = list(owned.items())
        if len(ownership.replicas) > 1:
            peers = [(mesh.rank_at(replica), replica) for replica in ownership.replicas]
            given = [Transfer(peer, box) for peer, _ in peers for box in owned]
            wanted = [Transfer(peer, box) for peer, at in peers for box in ownership.owned(at)]
            parts = Swap(group, rank, given, wanted).of_boxes(owned, local).wait()
        if ownership.roles.new:
            return _contribution(step, after, parts, local)
        return assemble(after, parts, local)

    return first.of_slices(local, before).then(finish)


def _group(step: Step) -> Communicator:
    """Return the communicator of an exchange: of its axes, or of all ranks of two meshes."""
    if step.source.mesh is step.target.mesh:
        return communicator(step.source.mesh, step.axes)
    meshes = step.source.mesh, step.target.mesh
    ranks = tuple(sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}))
    here = world.current()
    if ranks[-1] >= here.size or here.rank not in ranks:
        raise MeshError(
            f"redistribute: expected ranks of this world, which has {here.size}, and this rank "
            f"among them; got {meshes[0]!r} and {meshes[1]!r}"
        )
    return here.communicator(ranks, ())


_RUN: dict[str, Callable[[Step, torch.Tensor], Pending[torch.Tensor]]] = {
    "slice": _slice,
    "scale": _scale,
    "zero_fill": _zero_fill,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "exchange": _exchange,
    "reduce_exchange": _reduce_exchange,
}
_MAKES_NEW = ("all_reduce", "all_gather", "reduce_scatter", "zero_fill")
"""Steps whose result is contiguous and new, so that nothing needs to be done after them."""
