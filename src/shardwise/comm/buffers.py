"""Helpers of all engines: packed buffers, and checks of the arguments of collectives.

A check returns the canonical form of an argument, or raises `CollectiveError` with its name.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from shardwise.core.checks import as_int
from shardwise.core.errors import CollectiveError

Shape = tuple[int, ...]

_LARGE = 1 << 20
_MOST_SHOWN = 8


def is_large(num_bytes: int) -> bool:
    """Return whether a transfer of this size should travel as separate messages.

    For smaller transfers it is faster to pack all pieces into one buffer for one all-to-all. For
    larger ones that copy costs more than separate messages. All ranks must decide alike, so pass a
    size that all of them know.
    """
    return num_bytes >= _LARGE


# ---- buffers


def size_in_bytes(x: torch.Tensor) -> int:
    """Return the number of bytes of the elements of `x`."""
    return x.numel() * x.itemsize


def row_in_bytes(x: torch.Tensor, dim: int) -> int:
    """Return the bytes of a slice of length one along `dim`, also if `x` is empty there."""
    return torch.Size((*x.shape[:dim], *x.shape[dim + 1 :])).numel() * x.itemsize


def contiguous_copy(x: torch.Tensor) -> torch.Tensor:
    """Return a detached contiguous copy; the results of every engine are contiguous."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def with_own_storage(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, or a copy if its storage holds more than `x`."""
    return x if x.untyped_storage().nbytes() == size_in_bytes(x) else contiguous_copy(x)


def empty_like(x: torch.Tensor) -> torch.Tensor:
    """Return uninitialised contiguous memory of the shape of `x`, whatever its strides."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes, so that any dtype can travel."""
    return x.view(-1).view(torch.uint8)


def pack(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the pieces as one flat tensor: a view if they are adjacent in memory, else a copy."""
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
            return _packed_copy(pieces)
        end += piece.numel()
        total += piece.numel()
    return first.as_strided((total,), (1,)) if total else first.new_empty(0)


def _packed_copy(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    buffer = pieces[0].new_empty(sum(piece.numel() for piece in pieces))
    places = unpack(buffer, [tuple(piece.shape) for piece in pieces])
    for place, piece in zip(places, pieces, strict=True):
        place.copy_(piece.detach())
    return buffer


def unpack(buffer: torch.Tensor, shapes: list[Shape]) -> list[torch.Tensor]:
    """Return views of these shapes into a flat buffer: the inverse of `pack`."""
    counts = [torch.Size(shape).numel() for shape in shapes]
    ends = accumulate(counts)
    return [
        buffer[end - count : end].view(shape)
        for end, count, shape in zip(ends, counts, shapes, strict=True)
    ]


# ---- checks of arguments


def check_tensor(argument: str, x: Any) -> None:
    """Check that `x` is a tensor."""
    if not isinstance(x, torch.Tensor):
        raise CollectiveError(f"{argument}: expected a tensor, got {_described(x)}")


def as_dim(x: torch.Tensor, dim: int) -> int:
    """Return a dim of `x`, counted from 0."""
    position = as_int(dim)
    if x.ndim == 0:
        raise CollectiveError(f"dim: expected a tensor that has dims, got dim={dim!r} of a 0-d one")
    if position is None or not -x.ndim <= position < x.ndim:
        raise CollectiveError(
            f"dim: expected one of a {x.ndim}-d tensor, -{x.ndim} <= dim < {x.ndim}; got {dim!r}"
        )
    return position % x.ndim


def as_sizes(argument: str, sizes: Iterable[int], count: int) -> tuple[int, ...]:
    """Return a length for each of `count` ranks."""
    lengths = _ints(sizes)
    if lengths is None or len(lengths) != count or min(lengths) < 0:
        got = _described(sizes) if lengths is None else format_tuple(lengths)
        raise CollectiveError(f"{argument}: expected {count} lengths, one per rank; got {got}")
    return lengths


def as_shapes(argument: str, shapes: Iterable[Sequence[int]], count: int) -> list[Shape]:
    """Return a shape for each of `count` ranks."""
    given = _items(shapes)
    each = [_ints(shape) for shape in given or ()]
    found = [shape for shape in each if shape is not None and min(shape, default=0) >= 0]
    if given is None or len(found) != len(given):
        raise CollectiveError(
            f"{argument}: expected {count} shapes, one per rank; got {_described(shapes)}"
        )
    if len(found) != count:
        raise CollectiveError(f"{argument}: expected {count}, one per rank; got {len(found)}")
    return found


def as_pieces(argument: str, pieces: Iterable[torch.Tensor], count: int) -> list[torch.Tensor]:
    """Return a tensor for each of `count` ranks, all of one dtype."""
    found = _items(pieces)
    if found is None:
        raise CollectiveError(
            f"{argument}: expected {count} tensors, one per rank; got {_described(pieces)}"
        )
    if len(found) != count:
        raise CollectiveError(f"{argument}: expected {count}, one per rank; got {len(found)}")
    _check_one_dtype(argument, found)
    return found


def as_tensors(argument: str, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return one or more tensors, all of one dtype."""
    found = _items(tensors)
    if not found:
        raise CollectiveError(
            f"{argument}: expected a list of tensors, at least one; got {_described(tensors)}"
        )
    _check_one_dtype(argument, found)
    return found


def as_piece_lists(
    argument: str,
    lists: Iterable[Iterable[torch.Tensor]],
    own: Sequence[torch.Tensor],
    index: int,
    count: int,
) -> list[list[torch.Tensor]]:
    """Return, for each tensor of `own`, a list of `count` tensors, one per rank.

    The entry at `index`, the calling rank, must have the shape, dtype and device of that tensor.
    """
    found = _items(lists)
    if found is None or len(found) != len(own):
        got = _described(lists) if found is None else len(found)
        raise CollectiveError(
            f"{argument}: expected {len(own)} lists, each of a tensor per rank; got {got}"
        )
    result = [as_pieces(f"{argument}[{at}]", each, count) for at, each in enumerate(found)]
    for at, (each, like) in enumerate(zip(result, own, strict=True)):
        x = each[index]
        if x.shape != like.shape or x.dtype != like.dtype or x.device != like.device:
            raise CollectiveError(
                f"{argument}[{at}][{index}]: expected {_kind(like)}, as this rank's; got {_kind(x)}"
            )
    return result


def as_peer(argument: str, peer: int, count: int, besides: int | None = None) -> int:
    """Return the index of one of `count` ranks, other than `besides`, the calling rank."""
    index = as_int(peer)
    if index is None or not 0 <= index < count or index == besides:
        but = "" if besides is None else f" besides {besides}, which is this rank"
        raise CollectiveError(
            f"{argument}: expected an index from 0 to {count - 1}{but}; got {peer!r}"
        )
    return index


def as_messages(
    argument: str, tensors: Mapping[int, torch.Tensor], count: int, own: int
) -> dict[int, torch.Tensor]:
    """Return tensors by the index of a peer."""
    if not isinstance(tensors, Mapping):
        raise CollectiveError(
            f"{argument}: expected a dict of tensors by peer, got {_described(tensors)}"
        )
    found = {as_peer(argument, peer, count, own): x for peer, x in tensors.items()}
    for peer, x in found.items():
        check_tensor(f"{argument}[{peer}]", x)
    return found


def _check_one_dtype(argument: str, tensors: Sequence[Any]) -> None:
    for index, each in enumerate(tensors):
        check_tensor(f"{argument}[{index}]", each)
    dtypes = {each.dtype for each in tensors}
    if len(dtypes) != 1:
        named = ", ".join(sorted(map(str, dtypes)))
        raise CollectiveError(f"{argument}: expected one dtype, got {named}")


# ---- text for error messages


def format_list(values: Sequence[Any]) -> str:
    """Format values, only the first few of many: a mesh may have 100,000 ranks."""
    more = len(values) - _MOST_SHOWN
    first = ", ".join(map(str, values[:_MOST_SHOWN]))
    return f"{first} and {more} more" if more > 0 else first


def format_tuple(values: Sequence[Any]) -> str:
    """Format values as a tuple, shortened as by `format_list`."""
    return str(tuple(values)) if len(values) <= _MOST_SHOWN else f"({format_list(values)})"


def format_dtype_and_shape(x: torch.Tensor) -> str:
    """Format dtype and shape, such as `torch.float32 (4, 2)`."""
    return f"{x.dtype} {tuple(x.shape)}"


def _kind(x: torch.Tensor) -> str:
    return f"{format_dtype_and_shape(x)} on {x.device}"


def _described(value: Any) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def _ints(values: Any) -> tuple[int, ...] | None:
    """Return the ints that an iterable yields; None if it is none, or yields something else."""
    items = _items(values)
    if items is not None and set(map(type, items)) == {int}:  # the usual case, without a call each
        return tuple(items)
    ints = tuple(value for value in map(as_int, items or ()) if value is not None)
    return ints if items is not None and len(ints) == len(items) else None


def _items(values: Any) -> list[Any] | None:
    try:
        return list(values)
    except TypeError:
        return None
