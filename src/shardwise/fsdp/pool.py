"""Buffers of rows, used again from group to group and from step to step.

Fresh memory is dear: every page of it is zeroed first. And who gets a buffer for the second time
need not work out again where things are in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable

import torch

Size = tuple[int, int, torch.dtype, torch.device]
"""Rows, their length, dtype and device."""

SMALL = 2 << 20
"""Buffers of so many bytes are kept in any case, larger ones if several groups need one."""


def size_in_bytes(size: Size) -> int:
    """The memory of a buffer."""
    count, length, dtype, _ = size
    return count * length * dtype.itemsize


class Rows:
    """A buffer with a row for each rank.

    Arguments:
        size: what `Pool.take` was asked for.
    """

    def __init__(self, size: Size) -> None:
        count, length, dtype, device = size
        self.size = size
        with torch.inference_mode(False):  # it may be used again for training
            self.matrix = torch.empty(count, length, dtype=dtype, device=device)
        self._views: dict[Hashable, list[torch.Tensor]] = {}

    def views(
        self, key: Hashable, make: Callable[[torch.Tensor], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Views of it, made once for each key."""
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = make(self.matrix)
        return found


class Pool:
    """The buffers of one context."""

    def __init__(self) -> None:
        self._free: dict[Size, list[Rows]] = {}
        self._uses: Counter[Size] = Counter()

    def expect(self, sizes: Iterable[Size]) -> None:
        """Say which sizes will be needed, once for each group."""
        self._uses = Counter(sizes)
        self._free = {size: free for size, free in self._free.items() if size in self._uses}

    def take(self, size: Size) -> Rows:
        """A buffer, with any contents."""
        free = self._free.get(size)
        return free.pop() if free else Rows(size)

    def give(self, rows: Rows) -> None:
        """A buffer that is not needed any more."""
        if self._uses[rows.size] > 1 or size_in_bytes(rows.size) <= SMALL:
            self._free.setdefault(rows.size, []).append(rows)

    @property
    def nbytes(self) -> int:
        """The memory of the buffers that are kept, and not in use."""
        return sum(rows.matrix.nbytes for free in self._free.values() for rows in free)
