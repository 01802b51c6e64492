"""Memory that travels: how much it is; copies; pieces one after the other, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from shardwise.comm.arguments import Shape


def size_in_bytes(x: torch.Tensor) -> int:
    """The bytes of its elements."""
    return x.numel() * x.itemsize


def row_in_bytes(x: torch.Tensor, dim: int) -> int:
    """The bytes of a slice of length one along `dim`, also if `x` is empty there."""
    return torch.Size((*x.shape[:dim], *x.shape[dim + 1 :])).numel() * x.itemsize


def copied(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, which every engine's results are, however the input lies in memory."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def owned(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy if its memory holds more than `x`."""
    return x if x.untyped_storage().nbytes() == size_in_bytes(x) else copied(x)


def empty_like(x: torch.Tensor) -> torch.Tensor:
    """Contiguous memory for as much as `x`, however `x` lies."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as bytes, so that any dtype can travel."""
    return x.view(-1).view(torch.uint8)


def flat(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """The pieces one after the other: as they lie if they lie so already, else copied once."""
    first = pieces[0].detach()
    end = first.storage_offset()
    total = 0
    for piece in pieces:
        if not piece.numel():
            continue
        if total == 0:
            first, end = piece.detach(), piece.storage_offset()
        in_place = piece.is_contiguous() and not piece.is_conj() and not piece.is_neg()
        same = piece.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (in_place and same and piece.storage_offset() == end):
            return _copied(pieces)
        end += piece.numel()
        total += piece.numel()
    return first.as_strided((total,), (1,)) if total else first.new_empty(0)


def _copied(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    buffer = pieces[0].new_empty(sum(piece.numel() for piece in pieces))
    places = split(buffer, [tuple(piece.shape) for piece in pieces])
    for place, piece in zip(places, pieces, strict=True):
        place.copy_(piece.detach())
    return buffer


def split(buffer: torch.Tensor, shapes: list[Shape]) -> list[torch.Tensor]:
    """The pieces of these shapes that `flat` has put one after the other."""
    counts = [torch.Size(shape).numel() for shape in shapes]
    ends = accumulate(counts)
    return [
        buffer[end - count : end].view(shape)
        for end, count, shape in zip(ends, counts, shapes, strict=True)
    ]
