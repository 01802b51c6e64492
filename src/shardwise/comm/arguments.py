"""Checks of what users pass to collectives: each returns the canonical form, or refuses by name."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from shardwise.checks import as_int
from shardwise.errors import CollectiveError

Shape = tuple[int, ...]

_SHOWN = 8


def check_tensor(argument: str, x: Any) -> None:
    """Refuse what is no tensor."""
    if not isinstance(x, torch.Tensor):
        raise CollectiveError(f"{argument}: expected a tensor, got {_described(x)}")


def as_dim(x: torch.Tensor, dim: int) -> int:
    """A dim of `x`, counted from 0."""
    position = as_int(dim)
    if x.ndim == 0:
        raise CollectiveError(f"dim: expected a tensor that has dims, got dim={dim!r} of a 0-d one")
    if position is None or not -x.ndim <= position < x.ndim:
        raise CollectiveError(
            f"dim: expected one of a {x.ndim}-d tensor, -{x.ndim} <= dim < {x.ndim}; got {dim!r}"
        )
    return position % x.ndim


def as_sizes(argument: str, sizes: Iterable[int], count: int) -> tuple[int, ...]:
    """A length for each of `count` ranks."""
    lengths = _ints(sizes)
    if lengths is None or len(lengths) != count or min(lengths) < 0:
        got = _described(sizes) if lengths is None else shown(lengths)
        raise CollectiveError(f"{argument}: expected {count} lengths, one per rank; got {got}")
    return lengths


def as_shapes(argument: str, shapes: Iterable[Sequence[int]], count: int) -> list[Shape]:
    """A shape for each of `count` ranks."""
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
    """A tensor for each of `count` ranks, all of one dtype."""
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
    """Some tensors, all of one dtype."""
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
    """For each tensor of `own` one of each of `count` ranks; that at `index` is like it."""
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
    """The index of one of `count` ranks; not `besides`, which is the caller."""
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
    """Tensors by the index of a peer."""
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


# ---- how values are shown in messages


def listed(values: Sequence[Any]) -> str:
    """The values, the first few if they are many: a mesh may have a hundred thousand ranks."""
    more = len(values) - _SHOWN
    first = ", ".join(map(str, values[:_SHOWN]))
    return f"{first} and {more} more" if more > 0 else first


def shown(values: Sequence[Any]) -> str:
    """A tuple of the values, shortened as by `listed`."""
    return str(tuple(values)) if len(values) <= _SHOWN else f"({listed(values)})"


def dtype_and_shape(x: torch.Tensor) -> str:
    """Such as `torch.float32 (4, 2)`."""
    return f"{x.dtype} {tuple(x.shape)}"


def _kind(x: torch.Tensor) -> str:
    return f"{dtype_and_shape(x)} on {x.device}"


def _described(value: Any) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def _ints(values: Any) -> tuple[int, ...] | None:
    """Plain ints for anything that yields ints; None for all else."""
    items = _items(values)
    ints = tuple(value for value in map(as_int, items or ()) if value is not None)
    return ints if items is not None and len(ints) == len(items) else None


def _items(values: Any) -> list[Any] | None:
    try:
        return list(values)
    except TypeError:
        return None
