"""The stream of random words: one per element, by its position in the global tensor.

Philox is a counter-based generator, so a rank can start anywhere in the stream of a key. The words
of a shard are runs of the stream with gaps between them. This module finds the runs, and the
cheapest way to generate them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from shardwise.core.box import Box
from shardwise.core.layout import Layout

if TYPE_CHECKING:
    from numpy.typing import NDArray

Words: TypeAlias = "NDArray[np.uint64]"

BLOCK = 1 << 14
"""The number of words to generate at a time: small enough for the processor's cache."""
NONE: Words = np.empty(0, dtype=np.uint64)
_WORDS_PER_COUNT = 4
_JUMP = 500
"""The cost of a jump in the stream, in generated words."""


class _Stream(threading.local):
    """One Philox per thread, whose position is set: cheaper than a new generator each time."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._state: Any = self._philox.state

    def take(self, key: int, start: int, count: int) -> Words:
        """Return words `start` to `start + count` of the stream of a key."""
        number, skipped = divmod(start, _WORDS_PER_COUNT)
        place = self._state["state"]
        place["key"][0] = key
        place["counter"][0] = number
        self._philox.state = self._state
        return self._philox.random_raw(skipped + count)[skipped:]

    def take_each(self, key: int, starts: list[int], count: int) -> Words:
        """Return the words of several runs of equal length, concatenated."""
        if len(starts) == 1:
            return self.take(key, starts[0], count)
        philox, state, place = self._philox, self._state, self._state["state"]["counter"]
        state["state"]["key"][0] = key
        result = np.empty((len(starts), count), dtype=np.uint64)
        for row, start in zip(result, starts, strict=True):  # kept to few bytecodes
            number, skipped = divmod(start, _WORDS_PER_COUNT)
            place[0] = number
            philox.state = state
            row[:] = philox.random_raw(skipped + count)[skipped:]
        return result.reshape(-1)


_stream = _Stream()


class Runs(NamedTuple):
    """The words of one box of a shard: runs of the stream, with gaps between them.

    Either each run is generated alone, or with the gaps, if these cost less than jumps: dims from
    `level` on are then generated whole, and cut.
    """

    shape: tuple[int, ...]
    """The shape of the box. The other fields describe it in a tensor with as few dims as
    possible."""
    sizes: list[int]
    starts: list[int]
    counts: list[int]
    strides: list[int]
    level: int


@lru_cache(maxsize=4096)
def boxes_of(layout: Layout, place: tuple[int, ...] | None) -> list[tuple[Runs, Box]]:
    """Return the boxes of a shard: the runs of each, and its box within the shard."""
    return [(_runs(layout.shape, there), here) for there, here in layout.boxes(place)]


def _runs(shape: tuple[int, ...], box: Box) -> Runs:
    sizes, starts, counts = _merged(shape, box.start, box.shape)
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    last = len(sizes) - 1

    def cost(level: int) -> int:
        return math.prod(counts[:level]) * (_JUMP + counts[level] * strides[level])

    levels = [level for level in range(last + 1) if level == last or strides[level] <= BLOCK]
    return Runs(box.shape, sizes, starts, counts, strides, min(levels, key=cost))


def blocks(key: int, runs: Runs) -> Iterator[Words]:
    """Yield the words of a box in row-major order, about a block at a time."""
    parts: list[Words] = []
    held = 0
    for part in _parts(key, runs):
        parts.append(part)
        held += len(part)
        if held >= BLOCK:
            yield np.concatenate(parts) if len(parts) > 1 else part
            parts, held = [], 0
    if parts:
        yield np.concatenate(parts) if len(parts) > 1 else parts[0]


def _parts(key: int, runs: Runs) -> Iterator[Words]:
    """Yield the words of a box: short runs together, long runs in parts of about a block."""
    shape, sizes, starts, counts, strides, level = runs
    if 0 in shape:
        return
    count, stride = counts[level], strides[level]
    rows = max(1, BLOCK // stride)
    inner = zip(starts[level + 1 :], counts[level + 1 :], strict=True)
    kept = (slice(None), *(slice(start, start + many) for start, many in inner))
    firsts = _firsts(starts, counts, strides, level)
    if stride == 1 and count < BLOCK:
        several = BLOCK // count
        for at in range(0, len(firsts), several):
            yield _stream.take_each(key, firsts[at : at + several], count)
        return
    for first in firsts:
        for row in range(0, count, rows):
            height = min(rows, count - row)
            made = _stream.take(key, first + row * stride, height * stride)
            if stride > 1:
                made = made.reshape(height, *sizes[level + 1 :])[kept].reshape(-1)
            yield made


def _firsts(starts: list[int], counts: list[int], strides: list[int], level: int) -> list[int]:
    """Return the positions at which runs begin, where a run spans the dims from `level` on."""
    firsts = np.array([starts[level] * strides[level]], dtype=np.int64)
    for start, count, stride in zip(starts[:level], counts, strides, strict=False):
        steps = np.arange(start, start + count, dtype=np.int64) * stride
        firsts = (firsts[:, None] + steps).reshape(-1)
    return firsts.tolist()  # type: ignore[no-any-return]


def _merged(
    sizes: Sequence[int], starts: Sequence[int], counts: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Describe a box with fewer dims: a dim that the box spans joins the one before."""
    dims = [(1, 0, 1)]
    for size, start, count in zip(reversed(sizes), reversed(starts), reversed(counts), strict=True):
        inner = dims[-1]
        if inner[2] == inner[0]:
            dims[-1] = (size * inner[0], start * inner[0], count * inner[0])
        else:
            dims.append((size, start, count))
    columns = zip(*reversed(dims), strict=True)
    merged = [list(column) for column in columns]
    return merged[0], merged[1], merged[2]
