"""Index arithmetic: how axes split a length into chunks, and boxes of indices.

`chunk` is the only function in shardwise that computes the boundaries of shards. `cut` applies it
to dims that are cut in pieces.
"""

from __future__ import annotations

from typing import NamedTuple

Range = tuple[int, int]
"""A half-open range of indices: (start, stop)."""


def chunk(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """Return the `index`-th of `parts` chunks of `[start, stop)`, by the rule of `torch.chunk`.

    Each chunk has the length divided by `parts`, rounded up; the last ones may be short or empty.
    """
    step = -((start - stop) // parts)
    first = min(start + index * step, stop)
    return first, min(first + step, stop)


def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Return the lengths of all chunks of a dim: `chunk_sizes(5, 4) == (2, 2, 1, 0)`."""
    bounds = (chunk(0, size, parts, index) for index in range(parts))
    return tuple(stop - start for start, stop in bounds)


class Box(NamedTuple):
    """Half-open index ranges `[start, stop)`, one pair per dim of the tensor."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of the ranges."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that takes this box out of a global tensor."""
        return tuple(map(slice, self.start, self.stop))

    @property
    def is_empty(self) -> bool:
        """Whether the box holds no element."""
        return any(start >= stop for start, stop in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Box) -> Box:
        """Return the indices that both boxes hold; an empty box has no negative lengths."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, tuple(map(max, start, stop)))

    def within(self, outer: Box) -> Box:
        """Return the same indices, counted from the first corner of `outer`."""
        return Box(
            tuple(a - b for a, b in zip(self.start, outer.start, strict=True)),
            tuple(a - b for a, b in zip(self.stop, outer.start, strict=True)),
        )

    def __repr__(self) -> str:
        ranges = zip(self.start, self.stop, strict=True)
        return f"Box[{', '.join(f'{start}:{stop}' for start, stop in ranges)}]"
