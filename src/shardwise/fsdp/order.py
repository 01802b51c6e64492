"""In which order units are used: what came after one the last time probably does again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.fsdp.unit import Unit


class Order:
    """Units, in an order.

    Arguments:
        units: the first guess.
        used: how many of them were used; all by default.
    """

    def __init__(self, units: Iterable[Unit], used: int | None = None) -> None:
        self._units = list(units)
        self._used = len(self._units) if used is None else used
        self._position = {unit: index for index, unit in enumerate(self._units)}

    def after(self, used: dict[Unit, None]) -> Order:
        """The order of what was used now, and then of all others."""
        others = [unit for unit in self._units if unit not in used]
        return Order([*used, *others], len(used))

    @property
    def last(self) -> Unit:
        """What was used last."""
        return self._units[self._used - 1]

    def beyond(self, unit: Unit, step: int) -> Iterator[Unit]:
        """What follows one (`step` 1), or comes before it, the nearest first (`step` -1)."""
        at = self._position.get(unit)
        while at is not None and 0 <= (at := at + step) < len(self._units):
            yield self._units[at]
