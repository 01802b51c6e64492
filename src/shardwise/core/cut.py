"""Dims that are cut in pieces: the axes split each piece on its own, and never inside a unit.

Example: a fused weight [queries + keys + values, features] has three pieces in dim 0, and every
    rank holds its share of each of them. The pieces keep their places in the global tensor; the
    shard of a rank is the concatenation of its shares. Ordinary dims, without pieces, need only
    `box.chunk`, which also computes the boundaries here, counted in units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import torch

from shardwise.core.box import Range, chunk

Cut = tuple[tuple[int, int], ...]
"""The pieces of a dim, in order: (length of the piece, length of its units)."""


def shares(cut: Cut, counts: Sequence[int], place: Sequence[int]) -> list[Range]:
    """Return the range of each piece that one rank holds.

    Arguments:
        cut: the pieces.
        counts: the sizes of the axes that split the dim, outer to inner.
        place: the rank's position along each of these axes.
    """
    found = []
    offset = 0
    for length, unit in cut:
        start, stop = 0, length // unit
        for count, index in zip(counts, place, strict=True):
            start, stop = chunk(start, stop, count, index)
        found.append((offset + start * unit, offset + stop * unit))
        offset += length
    return found


def merge_ranges(ranges: Sequence[Range]) -> list[Range]:
    """Drop empty ranges and merge ranges that touch; if all are empty, return one empty range."""
    found: list[Range] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        elif start < stop:
            found.append((start, stop))
    return found or [(ranges[0][0], ranges[0][0]) if ranges else (0, 0)]


def count_below(ranges: Sequence[Range], index: int) -> int:
    """Count the indices of these ranges that are less than `index`."""
    return sum(min(stop, max(start, index)) - start for start, stop in ranges)


def take_ranges(tensor: torch.Tensor, dim: int, ranges: Sequence[Range]) -> torch.Tensor:
    """Return these ranges of a dim, concatenated; a view if there is only one."""
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def all_shares(cut: Cut, counts: Sequence[int]) -> list[list[Range]]:
    """Return the shares of every rank, with the position along the last axis varying fastest."""
    return [shares(cut, counts, place) for place in product(*map(range, counts))]


@lru_cache(maxsize=4096)
def canonical_cut(size: int, counts: tuple[int, ...], cut: Cut | None) -> Cut | None:
    """Return one representative of all cuts with the same boundaries.

    None means that the boundaries are those of a dim that is not cut.
    """
    parts = math.prod(counts)
    if cut is None or parts == 1:
        return None
    if len(cut) == 1 and (cut[0][1] == 1 or size % (parts * cut[0][1]) == 0):
        return None  # the common case, and meshes may be large
    cut = tuple(_smallest_unit(piece, counts) for piece in cut if piece[0])
    whole = all_shares(((size, 1),), counts)
    same = zip(all_shares(cut, counts), whole, strict=True)
    if all(nonempty_ranges(mine) == nonempty_ranges(ordinary) for mine, ordinary in same):
        return None
    return cut


def nonempty_ranges(ranges: Sequence[Range]) -> list[Range]:
    """Merge ranges that touch and drop empty ones: two lists of the same indices are then equal."""
    return [each for each in merge_ranges(ranges) if each[0] < each[1]]


def _smallest_unit(piece: tuple[int, int], counts: tuple[int, ...]) -> tuple[int, int]:
    length, unit = piece
    if unit == 1:
        return piece
    wanted = all_shares((piece,), counts)
    common = math.gcd(length, *(bound for (share,) in wanted for bound in share))
    for smaller in range(1, unit):
        if common % smaller == 0 and all_shares(((length, smaller),), counts) == wanted:
            return length, smaller
    return piece


def cut_within(cut: Cut, counts: Sequence[int], place: Sequence[int]) -> Cut:
    """Return the cut of one rank's shard, which inner axes split further."""
    held = shares(cut, counts, place)
    return tuple((stop - start, unit) for (start, stop), (_, unit) in zip(held, cut, strict=True))


def cut_between(cut: Cut, start: int, stop: int) -> Cut | None:
    """Return the pieces between two indices; None if one of the indices lies inside a piece."""
    offset, found = 0, []
    for length, unit in cut:
        if start <= offset and offset + length <= stop:
            found.append((length, unit))
        elif max(start, offset) < min(stop, offset + length):
            return None
        offset += length
    return tuple(found)


def rescale_cut(cut: Cut, size: int, counts: tuple[int, ...]) -> Cut | None:
    """Scale a cut to a dim of another size.

    None if some boundary would not be an integer.
    """
    total = sum(length for length, _ in cut)
    if total == size or not total:
        return cut if total == size else None
    parts = math.prod(counts)
    if len(cut) == 1 and cut[0][1] == 1 and total % parts == 0 and size % parts == 0:
        return ((size, 1),)
    found = []
    for piece in cut:
        made = _rescaled_piece(piece, size, total, counts)
        if made is None:
            return None
        found.append(made)
    return tuple(found)


@lru_cache(maxsize=4096)
def _rescaled_piece(
    piece: tuple[int, int], numerator: int, denominator: int, counts: tuple[int, ...]
) -> tuple[int, int] | None:
    length, unit = piece
    bounds = [bound for (share,) in all_shares((piece,), counts) for bound in share]
    if any(bound * numerator % denominator for bound in (length, *bounds)):
        return None
    length = length * numerator // denominator
    if unit * numerator % denominator == 0:  # the number of units stays
        return length, max(unit * numerator // denominator, 1)  # a piece of length 0 has units of 1
    wanted = [bound * numerator // denominator for bound in bounds]
    common = math.gcd(length, *wanted)
    for each in range(max(common, 1), 0, -1):
        if common % each == 0:
            made = all_shares(((length, each),), counts)
            if [bound for (share,) in made for bound in share] == wanted:
                return length, each
    return None


def repeating_part(cut: Cut, count: int) -> Cut | None:
    """Return the first of `count` equal parts of a cut; None if the cut does not consist of
    them."""
    if not count or len(cut) % count or cut != cut[: len(cut) // count] * count:
        return None
    return cut[: len(cut) // count]


def format_cut(cut: Cut) -> str:
    """Return the text of a cut, such as `(24/8+12/4)`: lengths, and units longer than 1."""
    texts = (str(length) if unit == 1 else f"{length}/{unit}" for length, unit in cut)
    return f"({'+'.join(texts)})"


def parse_cut(text: str) -> Cut:
    """Parse the text that `format_cut` returns."""
    pieces = (piece.partition("/") for piece in text.strip("()").split("+"))
    return tuple((int(length), int(unit or 1)) for length, _, unit in pieces)
