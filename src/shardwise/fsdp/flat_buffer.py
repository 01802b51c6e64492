"""Rows, which hold the shards of a unit, and row buffers, which collectives fill and send.

Shards of a unit are consecutive in a *row* that has the same length on every
rank. A `RowBuffer` has one row for each rank: an all_gather fills it, a reduce_scatter sends it.
Row buffers are reused from group to group and from step to step, for two reasons: the operating
system must zero the pages of new memory first, and the views of a reused buffer exist already.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch

from shardwise.fsdp.param import ShardedParam

ALIGNMENT = 16
"""Parameters begin at multiples of this number of elements, which fast kernels prefer."""

HEADER = ALIGNMENT
"""Elements at the start of a row, of which the first two are the unit's number."""

DIRECT_BYTES = 1 << 17
"""Shards of this number of bytes are sent in place: copying them costs more than a message."""

SMALL = 4 << 20
"""Free buffers up to this number of bytes are always kept, larger ones if several groups need
them."""

BufferSize = tuple[int, int, torch.dtype, torch.device]
"""The number of rows, their length, their dtype and device."""


def aligned(count: int) -> int:
    """Round a number of elements up to the alignment of parameters."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def lay_out_row(
    params: Sequence[ShardedParam], dtype: torch.dtype, device: torch.device
) -> tuple[int, int]:
    """Choose where each parameter of a unit begins in its row, and which ones are direct.

    Arguments:
        dtype: of the gathered parameters.
        device: of the gathered parameters.

    Returns:
        The length of the row, and its length without the direct parameters, which come last.
    """
    for each in params:
        sharding = each.sharding
        each.is_direct = (
            sharding.is_chunked
            and sharding.count > 1
            and sharding.size * dtype.itemsize >= DIRECT_BYTES
            and dtype is each.sharded.dtype
            and device == each.sharded.device
            and each.strides == torch.empty(sharding.gathered_shape, device="meta").stride()
        )
    length = buffered = HEADER
    for each in sorted(params, key=lambda each: each.is_direct):
        each.offset = length
        length += aligned(each.sharding.size)
        if not each.is_direct:
            buffered = length
    return length, buffered


def header_digits(number: int) -> list[int]:
    """Return the header of a unit's row: the unit's number as two digits, exact in every dtype.

    Receivers compare the headers of all rows, to detect ranks that have sent another unit.
    """
    return [number % 128, number // 128 % 128]


def size_in_bytes(size: BufferSize) -> int:
    """Return the number of bytes that a buffer needs."""
    count, length, dtype, _ = size
    return count * length * dtype.itemsize


def capacity(size: BufferSize) -> int:
    """Return the number of bytes to allocate for a buffer: at most a quarter more than it needs.
    Buffers of about the same size can then replace each other."""
    exact = size_in_bytes(size)
    step = 1 << max(math.frexp(exact)[1] - 3, 6)
    return -(-exact // step) * step


class RowBuffer:
    """A buffer with one row for each rank.

    Arguments:
        size: rows, length, dtype and device.
        memory: existing memory of at least that size, in bytes; allocated by default.
    """

    def __init__(self, size: BufferSize, memory: torch.Tensor | None = None) -> None:
        count, length, dtype, device = size
        self.size = size
        with torch.inference_mode(False):  # the buffer is also written to in training
            if memory is None:
                memory = torch.empty(capacity(size), dtype=torch.uint8, device=device)
            self.memory = memory
            flat = memory[: size_in_bytes(size)].view(dtype)
            self.matrix = flat.view(count, length)
        self._views: dict[Hashable, list[torch.Tensor]] = {}
        self._by_size: dict[BufferSize, RowBuffer] = {size: self}
        """The buffers that share this memory, by size."""

    def views(
        self, key: Hashable, make: Callable[[torch.Tensor], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Return views of the matrix, which `make` creates once for each key."""
        found = self._views.get(key)
        if found is None:
            with torch.inference_mode(False):
                found = self._views[key] = make(self.matrix)
        return found

    def with_size(self, size: BufferSize) -> RowBuffer:
        """Return the same memory as a buffer of another size."""
        found = self._by_size.get(size)
        if found is None:
            found = RowBuffer(size, self.memory)
            self._by_size[size] = found
            found._by_size = self._by_size
        return found


class BufferPool:
    """The free row buffers of one schedule."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.device], list[RowBuffer]] = {}
        self._uses: Counter[tuple[int, torch.device]] = Counter()

    def expect(self, sizes: Iterable[BufferSize]) -> None:
        """Declare which sizes will be needed, once for each bucket; other buffers are freed."""
        self._uses = Counter((capacity(size), size[3]) for size in sizes)
        self._free = {key: free for key, free in self._free.items() if key in self._uses}

    def take(self, size: BufferSize) -> RowBuffer:
        """Return a buffer with arbitrary contents."""
        free = self._free.get((capacity(size), size[3]))
        return free.pop().with_size(size) if free else RowBuffer(size)

    def give(self, rows: RowBuffer) -> None:
        """Take back a buffer that is not needed any more."""
        key = capacity(rows.size), rows.size[3]
        if self._uses[key] > 1 or key[0] <= SMALL:
            self._free.setdefault(key, []).append(rows)

    def clear(self) -> None:
        """Free all buffers."""
        self._free.clear()
        self._uses.clear()

    @property
    def nbytes(self) -> int:
        """The number of bytes of the free buffers."""
        return sum(rows.memory.nbytes for free in self._free.values() for rows in free)
