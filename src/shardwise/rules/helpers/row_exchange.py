"""Rows of a split dim that move between ranks: exchanges, and lookups in a table.

`plan_row_exchange` serves results that hold the rows in another order, or some of them: one
all-to-all gives each rank its chunk of the result, so the dim stays split. `share_rows` serves
results that are too short to be split: all ranks get all rows. `RowTable` serves lookups of each
rank's own indices in a table that is split by rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shardwise.comm import Communicator, communicator
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.dtensor.state import state
from shardwise.dtensor.writes import mark_detached_copy
from shardwise.rules.helpers.collectives import all_reduce_sum
from shardwise.rules.helpers.dims import chunks_of, out_of_range
from shardwise.rules.helpers.local_tensors import join, pad, pad_to_one_row, take_rows

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
            result = join([result, result.new_full(row, fill)], dim)
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
    if state.explicit is not None:
        over = ", ".join(map(mesh.axis_name, axes))
        state.explicit.refuse(
            f"{name}: explicit() forbids implicit communication, and rows of a dim that {over} "
            f"splits would move between ranks. Make the input whole on {over} first, with "
            "x.redistribute(placements=...)"
        )


# ---- small results


def share_rows(
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


# ---- lookups
# Each rank sends its indices to the owners of the rows, which send the rows back: each row once,
# even if a rank looks it up several times. The sizes of the messages depend on the indices.

_WRONG = -1
"""Sent in place of a number of rows if some index is out of range."""


class RowRange(NamedTuple):
    """Adjacent rows of a table that one rank owns."""

    start: int
    stop: int
    owner: int
    """The index of the rank in the group."""
    place: int
    """The place of the first row among all rows of the owner."""


class FetchedRows(NamedTuple):
    """The rows of a table that one rank looks up."""

    rows: torch.Tensor
    """The rows that this rank asked for; one row of zeros if it asked for none."""
    found: torch.Tensor
    """For each index the number of its row in `rows`; 0 if no rank has the row."""
    inside: torch.Tensor | None
    """Whether some rank has the row of each index; None if all rows exist."""
    padding: int = -1
    """The row that gets no gradient."""


class RowTable:
    """A table whose rows are spread over several ranks, which look up rows in it.

    Arguments:
        group: the ranks.
        ranges: the owners of the rows; together they may hold fewer rows than the table has.
        size: the number of rows of the table.
        padding: a row that gets no gradient.
    """

    def __init__(
        self, group: Communicator, ranges: Sequence[RowRange], size: int, padding: int = -1
    ) -> None:
        self.group, self.size = group, size
        self._padding = -1
        for start, stop, owner, place in ranges:
            if owner == group.index and start <= padding < stop:
                self._padding = padding - start + place
        ranges = sorted(each for each in ranges if each.start < each.stop) or [RowRange(0, 0, 0, 0)]
        self._ranges = torch.tensor(ranges, dtype=torch.long).view(-1, 4)
        self._is_whole = sum(each.stop - each.start for each in ranges) == size
        self._is_in_order = all(one.owner <= other.owner for one, other in pairwise(ranges))

    @staticmethod
    def of(layout: Layout, axes: tuple[int, ...], padding: int = -1) -> RowTable:
        """Return the table of the ranks that share dim 0 along these axes with this rank."""
        mesh, place = layout.mesh, layout.mesh.get_coordinate()
        assert place is not None, "this rank is on the mesh"
        ranges = []
        for owner, along in enumerate(product(*(range(mesh.shape[axis]) for axis in axes))):
            there = dict(enumerate(place)) | dict(zip(axes, along, strict=True))
            start, stop = layout.range(0, [there[axis] for axis in range(mesh.ndim)])
            ranges.append(RowRange(start, stop, owner, 0))
        return RowTable(communicator(mesh, axes), ranges, layout.shape[0], padding)

    def ask(self, local: torch.Tensor, indices: torch.Tensor) -> FetchedRows:
        """Fetch the rows of these indices.

        Forward: three all-to-alls, of the numbers of rows, the indices, and the rows. Backward: an
        all-to-all of the gradients of the rows; each rank first adds up those of equal indices.

        Arguments:
            local: the rows that this rank owns.
            indices: row numbers of the whole table; each rank has its own.
        """
        if indices.is_meta:  # only shapes matter
            return FetchedRows(pad_to_one_row(local, 0), indices, None)
        wanted, found = torch.unique(indices.long(), return_inverse=True)
        if len(wanted) and not 0 <= int(wanted[0]) <= int(wanted[-1]) < self.size:
            self._numbers([_WRONG] * self.group.size, wanted)
        start, stop, owner, first = self._at(wanted)
        place = wanted - start + first
        inside = None
        if not self._is_whole:
            held = (wanted >= start) & (wanted < stop)
            found, inside = (held.cumsum(0) - 1).masked_fill_(~held, 0)[found], held[found]
            owner, place = owner[held], place[held]
        if not self._is_in_order:
            order = owner.argsort(stable=True)
            owner, place = owner[order], place[order]
            found = pad_to_one_row(order.argsort(), 0)[found]
        sends = owner.bincount(minlength=self.group.size).tolist()
        receives = self._numbers(sends, wanted)
        parts = self.group.all_to_all(place.split_with_sizes(sends), [(each,) for each in receives])
        rows = rows_of(local, torch.cat(parts), self._padding)
        rows = AllToAll.apply(rows, self.group, 0, receives, sends)  # type: ignore[no-untyped-call]
        return FetchedRows(pad_to_one_row(rows, 0), found, inside)

    def _numbers(self, sends: list[int], like: torch.Tensor) -> list[int]:
        """Exchange the numbers of rows that the ranks want of each other (all-to-all)."""
        parts = like.new_tensor(sends).split_with_sizes([1] * len(sends))
        receives: list[int] = torch.cat(self.group.all_to_all(parts)).tolist()
        if _WRONG in receives:
            raise out_of_range(0, self.size)
        return receives

    def _at(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return for each row the range that it is in: start, stop, owner, place."""
        ranges = self._ranges.to(rows.device)
        at = torch.searchsorted(ranges[:, 0].contiguous(), rows, right=True) - 1
        return ranges[at.clamp_(min=0)].unbind(1)


def rows_of(table: torch.Tensor, indices: torch.Tensor, padding: int = -1) -> torch.Tensor:
    """Look up rows of a table; twice differentiable, also for no indices."""
    if indices.numel():
        return torch.embedding(table, indices, padding)
    # For no indices torch.embedding has no second derivative, which the other ranks run.
    return table.index_select(0, indices.flatten()).view(*indices.shape, table.size(1))
