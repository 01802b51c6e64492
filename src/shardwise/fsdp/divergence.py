"""Divergence of ranks: detect a rank that is about to run other collectives than its peers.

A rank that calls other modules than its peers would run a collective of another size than theirs,
on which some backends end the process. So each rank compares the sequence of its collectives with
that of the last step. If its next collective is not the expected one, it first asks its peers
whether they are about to run the same one. If they run another collective instead, both sides wait
until a time-out raises an error that names the modules. While steps repeat, nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from shardwise.comm import Communicator
from shardwise.core.errors import CollectiveError
from shardwise.fsdp.errors import ADVICE, GatherError
from shardwise.fsdp.unit import Unit


class ScheduleGuard:
    """The sequence of collectives in one kind of forward, or in backward."""

    def __init__(self) -> None:
        self._last: list[Hashable] | None = None
        self._now: list[Hashable] = []

    def begin(self) -> None:
        """Begin a new sequence."""
        self._now = []

    def end(self) -> None:
        """Make the finished sequence the expected one. An empty sequence is ignored: all parameters
        were still gathered."""
        if self._now:
            self._last = self._now

    def differs(self, collective: Hashable) -> bool:
        """Record the next collective; return whether the last sequence had another one here."""
        position = len(self._now)
        self._now.append(collective)
        if self._last is None:
            return False
        return position >= len(self._last) or self._last[position] != collective


class ScheduleGuards:
    """The guards of one schedule: one for each kind of sequence and each choice of settings."""

    def __init__(self) -> None:
        self._guards: dict[Hashable, ScheduleGuard] = {}
        self._settings: Hashable = None

    def forget(self) -> None:
        """Drop all sequences, as the units have changed."""
        self._guards.clear()

    def change_settings(self, settings: Hashable) -> None:
        """Switch to the sequences that belong to these settings of the groups."""
        self._settings = settings

    def begin(self, kind: Hashable) -> ScheduleGuard:
        """Return the guard of a kind, at the start of a new sequence."""
        guard = self._guards.setdefault((kind, self._settings), ScheduleGuard())
        guard.begin()
        return guard


def check_peers_agree(
    communicators: Sequence[Communicator], units: Sequence[Unit], action: str
) -> None:
    """Raise `GatherError` unless all ranks are about to do the same with these units.

    Arguments:
        action: a verb for the error, such as "gathers".
    """
    names = ", ".join(unit.name for unit in units)
    own = torch.tensor([units[0].number, len(units)])
    for communicator in communicators:
        try:
            found = communicator.all_gather(own).view(-1, 2)
        except CollectiveError as error:
            raise GatherError(
                f"this rank {action} {names}, other than the last time, and others do not: "
                f"{error}\n{ADVICE}"
            ) from error
        for rank, (number, count) in zip(communicator.ranks, found.tolist(), strict=True):
            if (number, count) != (units[0].number, len(units)):
                raise GatherError(
                    f"this rank {action} {names}, unit {units[0].number}, where rank {rank} has "
                    f"unit {number}\n{ADVICE}"
                )
