"""Keys: the index in `x[key]`, split into its basic part and its tensors.

Indexing works in two steps, as in torch: the basic part of a key (ints, slices, None, ...) selects
a region, which is a view; then the tensors of the key select elements of the region.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.box import Range
from shardwise.core.cut import count_below
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.dtensor.input_moves import move_input, plan_input_move
from shardwise.dtensor.tensor import DTensor, wrap
from shardwise.rules.spec import Dims, SplitContext
from shardwise.torch_internals import as_local

ALL = slice(None)
_MASKS = (torch.bool, torch.uint8)


# ---- the basic part of a key


@dataclass(frozen=True, slots=True)
class Pick:
    """The indices that an int or a slice selects in one dim: `count` of them from `start` on."""

    start: int
    step: int
    count: int
    drops: bool
    """Whether the dim is removed, because the item is an int."""
    is_all: bool
    """Whether the item selects the whole dim in order."""

    @property
    def is_long(self) -> bool:
        """Whether the selected rows can stay split: there is not just one."""
        return not self.drops and self.count != 1

    @property
    def rows(self) -> range:
        """The selected indices."""
        return range(self.start, self.start + self.count * self.step, self.step)

    def pieces(self, ranges: Sequence[Range]) -> tuple[int, int]:
        """Return the first place and the number of the selected indices in a local tensor that
        holds these ranges of the dim; for a step of 1."""
        before = count_below(ranges, self.start)
        return before, count_below(ranges, self.start + self.count) - before

    def part(self, first: int, end: int) -> tuple[int, int, slice]:
        """Find the selected indices in `[first, end)`.

        Returns the number of selected indices before them, their number, and the slice that selects
        them in a shard that begins at `first`.
        """
        skipped = min(max(-((self.start - first) // self.step), 0), self.count)
        until = min(max(-((self.start - end) // self.step), skipped), self.count)
        at = self.start + skipped * self.step - first
        length = until - skipped
        stop = at + (length - 1) * self.step + 1
        return skipped, length, slice(at, stop, self.step) if length else slice(0, 0)


def picks(key: Any, shape: Sequence[int]) -> list[Pick | None]:
    """Return what each item of a basic key selects; None for a new dim."""
    items = list(key) if isinstance(key, tuple) else [key]
    taken = sum(item is not None and item is not Ellipsis for item in items)
    sizes = iter(shape)
    return [
        None if item is None else _pick(item, next(sizes))
        for item in expand_ellipsis(items, len(shape), taken)
    ]


def expand_ellipsis(items: list[Any], ndim: int, taken: int) -> list[Any]:
    """Replace the Ellipsis of a key by full slices; its other items stand for `taken` dims."""
    if taken > ndim:
        raise IndexError(f"too many indices for tensor of dimension {ndim}")
    at = next((at for at, item in enumerate(items) if item is Ellipsis), len(items))
    rest = [item for item in items[at:] if item is not Ellipsis]
    return [*items[:at], *[ALL] * (ndim - taken), *rest]


def _pick(item: Any, size: int) -> Pick:
    if isinstance(item, slice):
        start, stop, step = item.indices(size)
        if step < 1:
            raise ValueError("step must be greater than zero")
        count = len(range(start, stop, step))
        return Pick(start, step, count, False, count == size and step == 1)
    if not -size <= item < size:
        raise IndexError(f"index {item} is out of bounds for dimension with size {size}")
    return Pick(item % size, 1, 1, True, False)


@dataclass(frozen=True, slots=True)
class Region:
    """The part of a tensor that a basic key selects, with the factors of its dims."""

    picks: list[Pick | None]
    whole: Dims
    """The factor of each dim of the tensor."""
    dims: Dims
    """The factor of each dim of the region; None for a dim that is only a part."""
    rows: Dims
    """As `dims`, but parts of a dim that are longer than one row have a factor too."""
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    """The factors of the dims of which the region has only a part."""


def region(key: Any, tensor: torch.Tensor) -> Region:
    """Return the region of a tensor that a basic key selects."""
    found = picks(key, tuple(tensor.shape))
    names: list[str | None] = []
    dims: list[str | None] = []
    rows: list[str | None] = []
    shape: list[int] = []
    parts: list[str] = []
    for pick in found:
        if pick is None:
            dims.append(None)
            rows.append(None)
            shape.append(1)
            continue
        name = f"d{len(names)}"
        names.append(name)
        parts += [] if pick.is_all else [name]
        if not pick.drops:
            dims.append(name if pick.is_all else None)
            rows.append(name if pick.is_all or pick.is_long else None)
            shape.append(pick.count)
    return Region(found, tuple(names), tuple(dims), tuple(rows), tuple(shape), tuple(parts))


@dataclass(frozen=True, slots=True)
class LocalRegion:
    """This rank's part of a region. Ints in split dims are slices here, of length 1 or 0."""

    key: tuple[Any, ...]
    """The key that takes it from this rank's shard."""
    spans: dict[int, tuple[int, int, int]]
    """For each dim that is a part of the region's dim: the number of indices before, here,
    after."""
    dropped: tuple[int, ...]
    """The dims of the local part that the region does not have, ascending."""
    whole: dict[int, tuple[int, Pick]]
    """The dims along which nothing is selected yet: the dim of the tensor, and what to select."""

    @property
    def severed(self) -> bool:
        """Whether a part of a split dim is selected: a copy where torch returns a view."""
        return bool(self.spans or self.whole)


def local_region(where: Region, context: SplitContext, *, but_long: bool = False) -> LocalRegion:
    """Return this rank's part of a region.

    Arguments:
        but_long: do not yet select in split dims of which the part is longer than one row.
    """
    layout = context.inputs[0]
    key: list[Any] = []
    spans: dict[int, tuple[int, int, int]] = {}
    dropped: list[int] = []
    whole: dict[int, tuple[int, Pick]] = {}
    dim = position = 0
    for pick in where.picks:
        if pick is None:
            key.append(None)
            position += 1
            continue
        if pick.is_all:
            key.append(ALL)
        elif but_long and layout.cuts[dim] is not None:  # the part consists of whole pieces
            start, length = pick.pieces(layout.ranges(dim))
            key.append(slice(start, start + length))
        elif but_long and pick.is_long and context.axes(where.whole[dim]):
            key.append(ALL)
            whole[position] = dim, pick
        elif context.axes(where.whole[dim]):
            before, length, taken = pick.part(*layout.range(dim))
            key.append(taken)
            spans[position] = before, length, pick.count - before - length
            dropped += [position] if pick.drops else []
        elif pick.drops:
            key.append(pick.start)
            position -= 1
        else:
            key.append(slice(pick.start, pick.start + pick.count * pick.step, pick.step))
        dim += 1
        position += 1
    return LocalRegion(tuple(key), spans, tuple(dropped), whole)


# ---- a whole key


@dataclass(frozen=True, slots=True)
class Key:
    """A key, split into its basic part and its tensors."""

    basic: tuple[Any, ...] | None
    """The ints, slices and new dims; None if they select everything."""
    indices: tuple[torch.Tensor | None, ...]
    """The tensor for each of the first dims of the region; empty if the key has no tensors."""


_SIMPLE = frozenset([int, type(None), type(Ellipsis)])


def is_simple(key: Any) -> bool:
    """Return whether a key is basic, by a quick test; False means that a closer look is needed."""
    if type(key) is not tuple:
        return _is_simple(key)
    for item in key:  # noqa: SIM110 (faster than all)
        if not _is_simple(item):
            return False
    return True


def _is_simple(item: Any) -> bool:
    if type(item) is slice:
        # A tensor may be a bound too, and its value is data.
        return (
            type(item.start) in _SIMPLE
            and type(item.stop) in _SIMPLE
            and type(item.step) in _SIMPLE
        )
    return type(item) in _SIMPLE


def parse_key(
    input: torch.Tensor, key: Any, mesh: DeviceMesh, *, only_tensors: bool = False
) -> Key:
    """Split a key into its basic part and its tensors; masks become the indices of their Trues.

    Arguments:
        only_tensors: as aten takes a key: a 0-d tensor is an index like any other, while in
            `x[key]` it is a number.
    """
    items = [_item(each, mesh, only_tensors) for each in _items(key)]
    items = expand_ellipsis(items, input.dim(), sum(_consumes(each) for each in items))
    basic: list[Any] = []
    indices: list[torch.Tensor | None] = []
    dim = 0
    for item in items:
        if is_mask(item):
            if tuple(item.shape) != tuple(input.shape[dim : dim + item.dim()]):
                raise IndexError(
                    f"The shape of the mask {list(item.shape)} at index {dim} does not match the "
                    f"shape of the indexed tensor {list(input.shape)} at index {dim}"
                )
            basic += [ALL] * item.dim()
            found = gather_whole(item, "__getitem__").nonzero(as_tuple=True)
            indices += [as_replicated(each, mesh) for each in found]
        elif isinstance(item, torch.Tensor):
            basic.append(ALL)
            indices.append(item)
        elif isinstance(item, bool):
            basic.append(None)
            indices.append(as_replicated(torch.zeros(int(item), dtype=torch.int64), mesh))
        else:
            basic.append(item)
            indices += [] if type(item) is int else [None]
        dim += _consumes(item)
    while indices and indices[-1] is None:
        indices.pop()
    is_all = all(type(item) is slice and item == ALL for item in basic)
    return Key(None if is_all else tuple(basic), tuple(indices))


def _items(key: Any) -> list[Any]:
    if isinstance(key, tuple):
        return list(key)
    if isinstance(key, list) and any(
        each is None or each is Ellipsis or isinstance(each, slice | list | tuple | torch.Tensor)
        for each in key
    ):
        return list(key)  # as torch still does, with a warning
    return [key]


def is_mask(item: Any) -> bool:
    """Return whether an item of a key is a mask."""
    return isinstance(item, torch.Tensor) and item.dtype in _MASKS


def _item(item: Any, mesh: DeviceMesh, keeps_numbers: bool) -> Any:
    """Return an item of a key in canonical form.

    An int, a bool, a slice of ints, None, Ellipsis, or a tensor of ints or bools. A 0-d tensor of
    an int becomes an int, unless `keeps_numbers` is set.
    """
    if item is None or item is Ellipsis or isinstance(item, bool):
        return item
    if isinstance(item, slice):
        bounds = item.start, item.stop, item.step
        return slice(*(each if each is None else int(_number(each)) for each in bounds))
    if not isinstance(item, torch.Tensor):
        if hasattr(item, "__index__") and not getattr(item, "shape", ()):
            return operator.index(item)
        if isinstance(item, str | bytes) or not hasattr(item, "__iter__"):
            raise IndexError(
                "only integers, slices (`:`), ellipsis (`...`), None and long or byte Variables "
                f"are valid indices (got {type(item).__name__})"
            )
        made = torch.as_tensor(item if hasattr(item, "dtype") else list(item))
        item = as_replicated(made if made.numel() else made.to(torch.int64), mesh)
    if item.dtype not in (torch.int64, torch.int32, *_MASKS):
        raise IndexError(
            f"tensors used as indices must be long, int, byte or bool tensors, got {item.dtype}"
        )
    if item.dim() > 0 or (keeps_numbers and item.dtype not in _MASKS):
        return item
    return bool(_number(item)) if item.dtype in _MASKS else int(_number(item))


def _number(value: Any) -> Any:
    """Return a number; that of a tensor with one element."""
    return gather_whole(value, "__getitem__").item() if isinstance(value, torch.Tensor) else value


def _consumes(item: Any) -> int:
    """Return the number of dims that an item of a key stands for."""
    if isinstance(item, torch.Tensor):
        return item.dim() if item.dtype in _MASKS else 1
    return 0 if item is None or item is Ellipsis or isinstance(item, bool) else 1


# ---- tensors beside a key


def as_replicated(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Wrap a tensor that is the same on every rank as a replicated DTensor."""
    if isinstance(tensor, DTensor):
        return tensor
    return wrap(tensor, Layout(mesh, tuple(tensor.shape)))


def mesh_of(*values: Any) -> DeviceMesh:
    """Return the mesh of the first DTensor among values."""
    for value in values:
        if isinstance(value, DTensor):
            return value._layout.mesh
        if isinstance(value, slice):
            value = value.start, value.stop, value.step
        if isinstance(value, list | tuple):
            found = mesh_of(*value)
            if found is not None:
                return found
    return None  # type: ignore[return-value]


def gather_whole(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Gather a whole tensor as a plain one; differentiable."""
    if not isinstance(tensor, DTensor):
        return tensor
    tensor._renew()
    layout = tensor._layout
    with as_local():
        how = plan_input_move(layout, Layout(layout.mesh, layout.shape), ())
        return move_input(tensor, how, name).as_subclass(torch.Tensor)
