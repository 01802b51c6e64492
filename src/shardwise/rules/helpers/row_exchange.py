"""Exchange of rows, for results that hold the rows of a split dim in another order, or some of
them.

`plan_row_exchange` gives each rank its chunk of the result by one all-to-all, so the dim stays
split. `owned_part` serves results that are too short to be split: all ranks get all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardwise.comm import Communicator, communicator
from shardwise.core.errors import PolicyError
from shardwise.core.mesh import DeviceMesh
from shardwise.dtensor.state import state
from shardwise.dtensor.writes import mark_detached_copy
from shardwise.rules.helpers.collectives import all_reduce_sum
from shardwise.rules.helpers.dims import chunks_of
from shardwise.rules.helpers.local_tensors import pad, take_rows

Local = Callable[[torch.Tensor], torch.Tensor]
Rows = npt.NDArray[np.int64]
"""Row numbers, in numpy: torch may be tracing while a call is planned."""


# ---- an exchange of rows


def plan_row_exchange(
    name: str,
    mesh: DeviceMesh,
    axes: tuple[int, ...],
    dim: int,
    sources: Sequence[int],
    targets: Sequence[int],
    rows: Rows | Sequence[int],
    fill: float = 0,
) -> Local:
    """Plan how shards of some tensors become shards of others that consist of the same rows.

    Forward: all-to-all, or no communication if all rows stay on their ranks. Backward: the
    transposed all-to-all.

    Arguments:
        name: the name of the operator, for messages.
        axes: the axes that split `dim`, outer to inner, before and after.
        sources: the global sizes along `dim` of the input tensors; their shards are concatenated.
        targets: the global sizes along `dim` of the results; their shards are concatenated.
        rows: for each row of the concatenated results its number in the concatenated inputs, or -1
            for a row that is filled.
        fill: the value of filled rows.
    """
    group = communicator(mesh, axes)
    me, count = group.index, len(group.ranks)
    owner, at, held = _held(sources, mesh, axes)
    holder, place, lengths = _held(targets, mesh, axes)
    rows = np.asarray(rows, dtype=np.int64)
    kept = rows >= 0
    owner, at, holder, place = owner[rows[kept]], at[rows[kept]], holder[kept], place[kept]
    moves = bool((owner != holder).any())

    sent, received = owner == me, holder == me
    sends = np.bincount(holder[sent], minlength=count).tolist()
    receives = np.bincount(owner[received], minlength=count).tolist()
    leaving = at[sent][holder[sent].argsort(kind="stable")]
    # The fill is appended after the last row that is received.
    arriving = np.full(lengths[me], sum(receives))
    arriving[place[received][owner[received].argsort(kind="stable")]] = np.arange(sum(receives))
    has_fill = bool((arriving == sum(receives)).any())
    pick, order = _picker(leaving, held[me], dim), _picker(arriving, sum(receives), dim)

    def run(local: torch.Tensor) -> torch.Tensor:
        result = pick(local)
        if moves:
            refuse_if_explicit(name, mesh, axes)
            result = AllToAll.apply(result, group, dim, sends, receives)  # type: ignore[no-untyped-call]
        if has_fill:
            row = list(result.shape)
            row[dim] = 1
            result = torch.cat([result, result.new_full(row, fill)], dim)
        result = order(result)
        # Without an exchange the result may be the input itself; callers expect a copy.
        return result if moves or has_fill else result.clone()

    return run


def _held(
    sizes: Sequence[int], mesh: DeviceMesh, axes: tuple[int, ...]
) -> tuple[Rows, Rows, list[int]]:
    """Return for each row of concatenated tensors its owner and its place there, and the number of
    rows of each rank."""
    owners, places = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    lengths = [0] * math.prod(mesh.shape[axis] for axis in axes)
    for size in sizes:
        for index, (start, stop) in enumerate(chunks_of(size, mesh, axes)):
            owners.append(np.full(stop - start, index))
            places.append(np.arange(stop - start) + lengths[index])
            lengths[index] += stop - start
    return np.concatenate(owners), np.concatenate(places), lengths


def _picker(rows: Rows, size: int, dim: int) -> Local:
    """Return a function that takes these rows out of `size` rows; a view if they are adjacent."""
    first, count = int(rows[0]) if len(rows) else 0, len(rows)
    if not np.array_equal(rows, np.arange(first, first + count)):
        return lambda x: take_rows(x, dim, rows)
    if count == size:
        return lambda x: x
    return lambda x: x.narrow(dim, first, count)


class AllToAll(torch.autograd.Function):
    """Forward: send `sends[i]` rows to rank i, receive `receives[i]` rows. Backward: the
    reverse."""

    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        group: Communicator,
        dim: int,
        sends: list[int],
        receives: list[int],
    ) -> torch.Tensor:
        ctx.back = group, dim, receives, sends
        shape = list(local.shape)
        shapes = [(*shape[:dim], length, *shape[dim + 1 :]) for length in receives]
        parts = [part.contiguous() for part in local.detach().split_with_sizes(sends, dim)]
        return torch.cat(group.all_to_all(parts, shapes), dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return AllToAll.apply(gradients[0], *ctx.back), None, None, None, None  # type: ignore[no-untyped-call]


def refuse_if_explicit(name: str, mesh: DeviceMesh, axes: Sequence[int]) -> None:
    """Refuse to move rows of a dim that these axes split, within `explicit()`."""
    if state.explicit:
        over = ", ".join(map(mesh.axis_name, axes))
        raise PolicyError(
            f"{name}: explicit() forbids implicit communication, and rows of a dim that {over} "
            f"splits would move between ranks. Make the input whole on {over} first, with "
            "x.redistribute(placements=...)"
        )


# ---- small results


def owned_part(
    name: str,
    part: torch.Tensor,
    dim: int,
    first: int,
    length: int,
    mesh: DeviceMesh,
    axes: Sequence[int],
) -> torch.Tensor:
    """Return the whole result, of `length` rows, on every rank. Each rank owns the rows `part`,
    which begin at row `first`.

    Forward: pad `part` with zeros to the whole, and all-reduce. Backward: no communication, because
    every rank has the whole gradient.
    """
    before = first if part.shape[dim] else 0
    after = length - before - part.shape[dim]
    whole = pad(part, {dim: (before, after)})
    if length == 0:
        return whole
    refuse_if_explicit(name, mesh, axes)
    return all_reduce_sum(whole, mesh, axes)


def mark_copy(result: torch.Tensor, name: str, key: Any = None) -> torch.Tensor:
    """Mark a result as a copy where torch returns a view; writes through an index are copied
    back."""
    if not result.numel():  # no row was moved, so the result may be a view of the input
        result = result.clone()
    mark_detached_copy(result, name, key)
    return result
