"""Buffers of rows, used again from group to group and from step to step.

Fresh memory is dear: every page of it is zeroed first. And who gets a buffer for the second time
need not work out again where things are in it.
"""

from __future__ import annotations

import math
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


def capacity(size: Size) -> int:
    """So many bytes, or up to a quarter more: buffers of about the same size can stand in for each
    other."""
    exact = size_in_bytes(size)
    step = 1 << max(math.frexp(exact)[1] - 3, 6)
    return -(-exact // step) * step


class Rows:
    """A buffer with a row for each rank.

    Arguments:
        size: what `Pool.take` was asked for.
        memory: bytes, at least as many.
    """

    def __init__(self, size: Size, memory: torch.Tensor | None = None) -> None:
        count, length, dtype, device = size
        self.size = size
        with torch.inference_mode(False):  # it may be used again for training
            if memory is None:
                memory = torch.empty(capacity(size), dtype=torch.uint8, device=device)
            self.memory = memory
            flat = memory[: size_in_bytes(size)].view(dtype)
            self.matrix = flat.view(count, length)
        self._views: dict[Hashable, list[torch.Tensor]] = {}
        self.same: dict[Size, Rows] = {size: self}
        """What the memory has been used for, by size."""

    def views(
        self, key: Hashable, make: Callable[[torch.Tensor], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Views of it, made once for each key."""
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = make(self.matrix)
        return found

    def as_size(self, size: Size) -> Rows:
        """The same memory, as a buffer of another size."""
        found = self.same.get(size)
        if found is None:
            found = Rows(size, self.memory)
            self.same[size] = found
            found.same = self.same
        return found


class Pool:
    """The buffers of one context."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.device], list[Rows]] = {}
        self._uses: Counter[tuple[int, torch.device]] = Counter()

    def expect(self, sizes: Iterable[Size]) -> None:
        """Say which sizes will be needed, once for each group."""
        self._uses = Counter((capacity(size), size[3]) for size in sizes)
        self._free = {key: free for key, free in self._free.items() if key in self._uses}

    def take(self, size: Size) -> Rows:
        """A buffer, with any contents."""
        free = self._free.get((capacity(size), size[3]))
        return free.pop().as_size(size) if free else Rows(size)

    def give(self, rows: Rows) -> None:
        """A buffer that is not needed any more."""
        key = capacity(rows.size), rows.size[3]
        if self._uses[key] > 1 or key[0] <= SMALL:
            self._free.setdefault(key, []).append(rows)

    @property
    def nbytes(self) -> int:
        """The memory of the buffers that are kept, and not in use."""
        return sum(rows.memory.nbytes for free in self._free.values() for rows in free)
