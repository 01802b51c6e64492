"""Rows that ranks ask each other for: lookups of each rank's own indices in a table split by rows.

The indices go to those who have the rows, and the rows come back: each once, however often a rank
looks it up. How many there are depends on the values of the indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import NamedTuple

import torch

from shardwise.comm import Communicator, communicator
from shardwise.layout import Layout
from shardwise.rules.indexing import out_of_range
from shardwise.rules.padding import with_a_row
from shardwise.rules.rows import AllToAll

_WRONG = -1
"""In place of a number of rows: some index is of no row."""


class Range(NamedTuple):
    """Rows of a table that one rank has, one after the other."""

    start: int
    stop: int
    owner: int
    """The index of that rank among those who ask each other."""
    place: int
    """Where the first of them is among all rows that it has."""


class Answer(NamedTuple):
    """What a rank needs of a table to look up its own indices."""

    rows: torch.Tensor
    """The rows that were asked for, and some row if none was."""
    found: torch.Tensor
    """For each index its row among them; 0 for one that nobody has."""
    inside: torch.Tensor | None
    """Which of the indices somebody has; None if that is all."""
    padding: int = -1
    """One of the rows that gets no gradient."""


class Table:
    """A table whose rows lie on several ranks, of which each asks for some.

    Arguments:
        group: those ranks.
        ranges: who has which rows, all of which may be less than the table's.
        size: how many rows the table has.
        padding: a row that gets no gradient.
    """

    def __init__(
        self, group: Communicator, ranges: Sequence[Range], size: int, padding: int = -1
    ) -> None:
        self.group, self.size = group, size
        self._padding = -1
        for start, stop, owner, place in ranges:
            if owner == group.index and start <= padding < stop:
                self._padding = padding - start + place
        ranges = sorted(each for each in ranges if each.start < each.stop) or [Range(0, 0, 0, 0)]
        self._ranges = torch.tensor(ranges, dtype=torch.long).view(-1, 4)
        self._is_whole = sum(each.stop - each.start for each in ranges) == size
        self._is_in_order = all(one.owner <= other.owner for one, other in pairwise(ranges))

    @staticmethod
    def of(layout: Layout, axes: tuple[int, ...], padding: int = -1) -> Table:
        """That of the ranks along axes which split dim 0, as seen from this rank's place."""
        mesh, place = layout.mesh, layout.mesh.get_coordinate()
        assert place is not None, "this rank is on the mesh"
        ranges = []
        for owner, along in enumerate(product(*(range(mesh.shape[axis]) for axis in axes))):
            there = dict(enumerate(place)) | dict(zip(axes, along, strict=True))
            start, stop = layout.range(0, [there[axis] for axis in range(mesh.ndim)])
            ranges.append(Range(start, stop, owner, 0))
        return Table(communicator(mesh, axes), ranges, layout.shape[0], padding)

    def ask(self, local: torch.Tensor, indices: torch.Tensor) -> Answer:
        """The rows that these indices name.

        Forward: all-to-all of numbers of rows, of indices, of rows. Backward: all-to-all of the
        rows' gradients; those of an index that a rank has several times are summed first.

        Arguments:
            local: all rows that this rank has.
            indices: of rows of the whole table; each rank has its own.
        """
        if indices.is_meta:  # shapes are all there is
            return Answer(with_a_row(local, 0), indices, None)
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
            found = with_a_row(order.argsort(), 0)[found]
        sends = owner.bincount(minlength=self.group.size).tolist()
        receives = self._numbers(sends, wanted)
        parts = self.group.all_to_all(place.split_with_sizes(sends), [(each,) for each in receives])
        rows = rows_of(local, torch.cat(parts), self._padding)
        rows = AllToAll.apply(rows, self.group, 0, receives, sends)  # type: ignore[no-untyped-call]
        return Answer(with_a_row(rows, 0), found, inside)

    def _numbers(self, sends: list[int], like: torch.Tensor) -> list[int]:
        """How many rows each rank wants, of how many this one wants of each."""
        parts = like.new_tensor(sends).split_with_sizes([1] * len(sends))
        receives: list[int] = torch.cat(self.group.all_to_all(parts)).tolist()
        if _WRONG in receives:
            raise out_of_range(0, self.size)
        return receives

    def _at(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """For each row the range it is in: start, stop, owner, place."""
        ranges = self._ranges.to(rows.device)
        at = torch.searchsorted(ranges[:, 0].contiguous(), rows, right=True) - 1
        return ranges[at.clamp_(min=0)].unbind(1)


def rows_of(table: torch.Tensor, indices: torch.Tensor, padding: int = -1) -> torch.Tensor:
    """The rows of a table at indices, twice differentiable also of none."""
    if indices.numel():
        return torch.embedding(table, indices, padding)
    # Of no indices torch's own has no second derivative, and other ranks have some.
    return table.index_select(0, indices.flatten()).view(*indices.shape, table.size(1))
