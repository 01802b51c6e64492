"""All layouts of a mesh, and tensors in these layouts, for the tests of redistribution.

The references here use neither `Layout.box` nor plans: a shard is cut out of the full tensor by
nested `torch.chunk`, and the value of a pending tensor is computed from all its contributions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import permutations, product

import torch

import shardwise as sw
from shardwise import AxisCost, Costs, DeviceMesh, Layout

Place = tuple[int, ...]
Pair = tuple[Layout, Layout]

BYTES_ONLY = Costs(default=AxisCost(0.0, 1e-9), start=1e-15)
"""Under these costs the plan with the fewest bytes to the busiest rank wins."""


# ---- meshes and layouts


def abstract(shape: Sequence[int]) -> DeviceMesh:
    return DeviceMesh.abstract(shape, tuple("xyzw"[: len(shape)]))


def places(mesh: DeviceMesh) -> Iterator[Place]:
    return product(*map(range, mesh.shape))


def layouts(
    mesh: DeviceMesh, shape: Sequence[int], ops: Sequence[str] = ("sum",)
) -> Iterator[Layout]:
    """Yield every layout: each axis whole, pending or splitting a dim; all orders of nesting."""
    for uses in product([None, *ops, *range(len(shape))], repeat=mesh.ndim):
        split = [[axis for axis, use in enumerate(uses) if use == dim] for dim in range(len(shape))]
        partial = {axis: use for axis, use in enumerate(uses) if isinstance(use, str)}
        for order in product(*map(permutations, split)):
            yield Layout(mesh, shape, order, partial)


def pairs(
    mesh: DeviceMesh, shape: Sequence[int], most: int | None = None, ops: Sequence[str] = ("sum",)
) -> list[Pair]:
    """Return every ordered pair of layouts, or a fixed sample of `most` pairs."""
    found = list(product(layouts(mesh, shape, ops), repeat=2))
    if most is None or len(found) <= most:
        return found
    return random.Random(f"{mesh.shape} {shape}").sample(found, most)


def split_axes(layout: Layout) -> set[int]:
    return {axis for axes in layout.shard_order for axis in axes}


def pending_axes(layout: Layout) -> set[int]:
    return {axis for axis, _ in layout.partial}


# ---- tensors


def numbered(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return 1, 2, 3, ...: small integers, so that sums are exact in any order."""
    return torch.arange(1, math.prod(shape) + 1, dtype=dtype).reshape(tuple(shape))


def piece(full: torch.Tensor, layout: Layout, place: Place) -> torch.Tensor:
    """Return the shard at `place` of the full tensor."""
    for dim, axes in enumerate(layout.shard_order):
        for axis in axes:
            chunks = full.chunk(layout.mesh.shape[axis], dim)
            missing = place[axis] >= len(chunks)  # torch.chunk leaves empty chunks out
            full = full.narrow(dim, 0, 0) if missing else chunks[place[axis]]
    return full


def contributions(full: torch.Tensor, count: int, op: str) -> list[torch.Tensor]:
    """Return `count` different tensors that `op` reduces to the full one."""
    shifts = [torch.full_like(full, 2 * index + 1) for index in range(count - 1)]
    match op:
        case "sum":
            return [*shifts, full - sum(shifts)]
        case "avg":
            return [*shifts, full * count - sum(shifts)]
        case "max":
            return [full - shift for shift in shifts] + [full]
        case "min":
            return [full + shift for shift in shifts] + [full]
        case _:  # of powers of two, as they multiply without rounding
            factors = [torch.full_like(full, 2**index) for index in range(1, count)]
            return [*factors, full / 2 ** (count * (count - 1) // 2)]


REDUCE: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
    "sum": lambda all: torch.stack(all).sum(0),
    "avg": lambda all: torch.stack(all).mean(0),
    "max": lambda all: torch.stack(all).amax(0),
    "min": lambda all: torch.stack(all).amin(0),
    "product": lambda all: reduce(torch.mul, all),
}


def local_tensor(full: torch.Tensor, layout: Layout, place: Place) -> torch.Tensor:
    """Return the local tensor of the rank at `place`."""
    for axis, op in layout.partial:
        full = contributions(full, layout.mesh.shape[axis], op)[place[axis]]
    return piece(full, layout, place).clone(memory_format=torch.contiguous_format)


def value_at(layout: Layout, locals: dict[Place, torch.Tensor], place: Place) -> torch.Tensor:
    """Return the value of the shard at `place` after all its pending reductions."""
    if not layout.partial:
        return locals[place]
    ends: dict[Place, torch.Tensor] = locals
    for axis, op in layout.partial:
        size = layout.mesh.shape[axis]
        ends = {
            at: REDUCE[op]([ends[(*at[:axis], index, *at[axis + 1 :])] for index in range(size)])
            for at in places(layout.mesh)
        }
    return ends[place]


# ---- moves


def moved(pair: Pair, full: torch.Tensor, costs: Costs | None = None) -> torch.Tensor:
    """Return this rank's piece after a move, with the checks that one rank can make alone."""
    src, dst = pair
    place = src.mesh.get_coordinate()
    assert place is not None
    local = local_tensor(full, src, place)
    before = local.clone()
    result = sw.redistribute_local(local, src, dst, costs=costs)
    assert isinstance(result, torch.Tensor)
    assert torch.equal(local, before), f"{src} -> {dst} wrote to its input"
    assert result.dtype == full.dtype and result.is_contiguous()
    if src is not dst and result.numel():
        memory = (result.untyped_storage().data_ptr(), local.untyped_storage().data_ptr())
        assert memory[0] != memory[1], f"{src} -> {dst} returns its input's memory"
    return result


def check_everywhere(pair: Pair, full: torch.Tensor, results: Sequence[torch.Tensor]) -> None:
    """Compare the pieces of all ranks, in the order of the target's mesh, with the full tensor."""
    src, dst = pair
    all_places = list(places(dst.mesh))
    locals = dict(zip(all_places, results, strict=True))
    for place in all_places:
        expected = piece(full, dst, place)
        assert locals[place].shape == expected.shape, f"{src} -> {dst} at {place}"
        got = value_at(dst, locals, place)
        assert torch.equal(got, expected), f"{src} -> {dst} at {place}: {got} is not {expected}"
