"""Dims cut in pieces: each piece is split over the axes on its own, and in whole units.

A fused weight such as [queries + keys + values, features] is split so that every rank has its share
of each piece. The pieces keep their places in the global tensor; a rank's shard is its shares, one
after the other. Boundaries come from `box.chunk`, which here counts units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import torch

from shardwise.box import Range, chunk

Cut = tuple[tuple[int, int], ...]
"""The pieces of a dim, in order: the length of each, and the length of its units."""


def shares(cut: Cut, counts: Sequence[int], place: Sequence[int]) -> list[Range]:
    """What is held of each piece at a place.

    Arguments:
        cut: the pieces.
        counts: into how many chunks the axes split them, outer to inner.
        place: which of the chunks, outer to inner.
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


def joined(ranges: Sequence[Range]) -> list[Range]:
    """Ascending ranges without empty ones, those that touch made one; one empty if all are."""
    found: list[Range] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        elif start < stop:
            found.append((start, stop))
    return found or [(ranges[0][0], ranges[0][0]) if ranges else (0, 0)]


def count_below(ranges: Sequence[Range], index: int) -> int:
    """How many of the indices in these ranges are below one."""
    return sum(min(stop, max(start, index)) - start for start, stop in ranges)


def taken(tensor: torch.Tensor, dim: int, ranges: Sequence[Range]) -> torch.Tensor:
    """These ranges of a dim, one after the other: a view if there is but one."""
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def all_shares(cut: Cut, counts: Sequence[int]) -> list[list[Range]]:
    """What is held of each piece at every place, the last of `counts` fastest."""
    return [shares(cut, counts, place) for place in product(*map(range, counts))]


@lru_cache(maxsize=4096)
def canonical(size: int, counts: tuple[int, ...], cut: Cut | None) -> Cut | None:
    """The one cut of all that have the same boundaries; None if they are an ordinary dim's."""
    parts = math.prod(counts)
    if cut is None or parts == 1:
        return None
    if len(cut) == 1 and (cut[0][1] == 1 or size % (parts * cut[0][1]) == 0):
        return None  # the common case, and meshes may be large
    cut = tuple(_smallest_unit(piece, counts) for piece in cut if piece[0])
    whole = all_shares(((size, 1),), counts)
    same = zip(all_shares(cut, counts), whole, strict=True)
    if all(_held(mine) == _held(ordinary) for mine, ordinary in same):
        return None
    return cut


def _held(ranges: list[Range]) -> list[Range]:
    return [each for each in joined(ranges) if each[0] < each[1]]


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


def within(cut: Cut, counts: Sequence[int], place: Sequence[int]) -> Cut:
    """How a rank's share is cut in turn by the axes inside: its part of each piece."""
    held = shares(cut, counts, place)
    return tuple((stop - start, unit) for (start, stop), (_, unit) in zip(held, cut, strict=True))


def between(cut: Cut, start: int, stop: int) -> Cut | None:
    """The pieces that make up the indices from `start` to `stop`; None if these tear a piece."""
    offset, found = 0, []
    for length, unit in cut:
        if start <= offset and offset + length <= stop:
            found.append((length, unit))
        elif max(start, offset) < min(stop, offset + length):
            return None
        offset += length
    return tuple(found)


def rescaled(cut: Cut, size: int, counts: tuple[int, ...]) -> Cut | None:
    """The cut of a dim of another size, at the same places up to scale; None if that is at no
    whole index."""
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
    if unit * numerator % denominator == 0:  # as many units as before
        return length, max(unit * numerator // denominator, 1)  # of length 0: a unit is at least 1
    wanted = [bound * numerator // denominator for bound in bounds]
    common = math.gcd(length, *wanted)
    for each in range(max(common, 1), 0, -1):
        if common % each == 0:
            made = all_shares(((length, each),), counts)
            if [bound for (share,) in made for bound in share] == wanted:
                return length, each
    return None


def repeated(cut: Cut, count: int) -> Cut | None:
    """The first of `count` equal parts of a cut, if it is made of such."""
    if not count or len(cut) % count or cut != cut[: len(cut) // count] * count:
        return None
    return cut[: len(cut) // count]


def shown(cut: Cut) -> str:
    """Such as `(24/8+12/4)`: lengths, and units that are longer than 1."""
    texts = (str(length) if unit == 1 else f"{length}/{unit}" for length, unit in cut)
    return f"({'+'.join(texts)})"


def parsed(text: str) -> Cut:
    """What `shown` gave, of digits."""
    pieces = (piece.partition("/") for piece in text.strip("()").split("+"))
    return tuple((int(length), int(unit or 1)) for length, _, unit in pieces)
