"""Lookups of each rank's own indices in a table that is split by rows.

Each rank sends its indices to the owners of the rows, which send the rows back: each row once, even
if a rank looks it up several times. The sizes of the messages depend on the values of the indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import NamedTuple

import torch

from shardwise.comm import Communicator, communicator
from shardwise.core.layout import Layout
from shardwise.rules.helpers.local_tensors import pad_to_one_row
from shardwise.rules.helpers.row_exchange import AllToAll
from shardwise.rules.index.indexing import out_of_range

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
