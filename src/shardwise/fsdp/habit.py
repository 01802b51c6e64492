"""What ranks gather and reduce, in which order: as the last time, or after asking the others.

A rank that calls other modules than its peers would meet them in a collective of another size,
which some backends answer by ending the process. So a rank that is about to do something else than
the last time at this point asks its peers whether they are, too. If they are not, they wait for it
in a collective, and it for them; what ends the wait is a time-out, and an error that names the
modules. Nothing is asked as long as steps are alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from shardwise.comm import Communicator
from shardwise.errors import CollectiveError
from shardwise.fsdp.errors import ADVICE, GatherError
from shardwise.fsdp.unit import Unit


class Habit:
    """What is done in one kind of forward, or in backward, in its order."""

    def __init__(self) -> None:
        self._last: list[Hashable] | None = None
        self._now: list[Hashable] = []

    def begin(self) -> None:
        """Something is about to be done from the start."""
        self._now = []

    def end(self) -> None:
        """It was done to its end, and is what is expected from now on; unless there was nothing
        to do, as parameters were still there."""
        if self._now:
            self._last = self._now

    def departs(self, what: Hashable) -> bool:
        """Whether doing this now is not what was done the last time."""
        at = len(self._now)
        self._now.append(what)
        if self._last is None:
            return False
        return at >= len(self._last) or self._last[at] != what


class Habits:
    """Those of one context, for each way in which its groups were set."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Habit] = {}
        self._settings: Hashable = None

    def forget(self) -> None:
        """The units are others now."""
        self._known.clear()

    def change(self, settings: Hashable) -> None:
        """The groups are set so from now on."""
        self._settings = settings

    def begun(self, kind: Hashable) -> Habit:
        """The one of this kind, from its start."""
        habit = self._known.setdefault((kind, self._settings), Habit())
        habit.begin()
        return habit


def agree(communicators: Sequence[Communicator], units: Sequence[Unit], doing: str) -> None:
    """See to it that all ranks are about to do the same with these units.

    Arguments:
        doing: what, in the error.
    """
    names = ", ".join(unit.name for unit in units)
    own = torch.tensor([units[0].number, len(units)])
    for communicator in communicators:
        try:
            found = communicator.all_gather(own).view(-1, 2)
        except CollectiveError as error:
            raise GatherError(
                f"this rank {doing} {names}, other than the last time, and others do not: "
                f"{error}\n{ADVICE}"
            ) from error
        for rank, (number, count) in zip(communicator.ranks, found.tolist(), strict=True):
            if (number, count) != (units[0].number, len(units)):
                raise GatherError(
                    f"this rank {doing} {names}, unit {units[0].number}, where rank {rank} has "
                    f"unit {number}\n{ADVICE}"
                )
