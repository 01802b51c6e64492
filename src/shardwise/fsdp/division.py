"""How one parameter is divided among the ranks that shard it.

Its DTensor lies on the data-parallel axes, and on those of tensor parallelism if it lay there
before: tensor parallelism cuts first, so that what a rank gathers is the piece it computes with.
Both layouts, and which rows of that piece each rank holds, follow from the DTensor's own layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from shardwise.box import Range, chunk
from shardwise.errors import MeshError
from shardwise.fsdp.errors import FSDPError
from shardwise.fsdp.mesh_info import DataParallelMeshInfo
from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh
from shardwise.tensor import DTensor

Shape = tuple[int, ...]


def sharded_layout(
    tensor: torch.Tensor, info: DataParallelMeshInfo, dim: int | None, name: str
) -> Layout:
    """How a parameter lies once it is split along `dim` (None: not at all) over the shard axis."""
    if not isinstance(tensor, DTensor):
        split = {} if dim is None or info.shard_mesh_dim is None else {dim: [info.shard_mesh_dim]}
        return Layout(info.mesh, tensor.shape, split)
    before = tensor._layout
    if before.partial:
        raise FSDPError(f"{name}: expected no pending sums, got {before!r}; redistribute it first")
    mesh = _joint_mesh(info.mesh, before.mesh, name)
    moved = info.mesh.ndim  # the data-parallel axes come first
    order = [[axis + moved for axis in axes] for axes in before.shard_order]
    if dim is not None and info.shard_mesh_dim is not None:
        order[dim].append(info.shard_mesh_dim)
    cuts = before.cuts if before.is_cut else ()
    return Layout(mesh, before.shape, order, None, cuts)


def _joint_mesh(data: DeviceMesh, other: DeviceMesh, name: str) -> DeviceMesh:
    """The mesh with the data-parallel axes and those that a DTensor lies on already."""
    names, others = data.mesh_dim_names, other.mesh_dim_names
    if names is None or others is None or data.root is not other.root or data is other:
        raise FSDPError(
            f"{name}: it is a DTensor on {other!r}, and mesh is {data!r}; expected two parts of "
            "one mesh with names, such as mesh['dp'] beside mesh['tp']"
        )
    both = [axis for axis in names if axis in others]
    if both:
        raise FSDPError(
            f"{name}: it lies on {other!r} already, which has axis {both[0]!r} of mesh; lay out "
            "the model on the other axes only, such as mesh['tp']"
        )
    try:
        return data.root[(*names, *others)]
    except MeshError as error:
        raise FSDPError(f"{name}: no mesh has both {names} and {others}: {error}") from None


@dataclass(frozen=True)
class Division:
    """What each rank holds of a parameter.

    Arguments:
        layout: of the DTensor that the module has at rest.
        info: the data-parallel axes.
    """

    layout: Layout
    whole_layout: Layout | None
    """Of the gathered parameter, on the other axes; None if there are none, and it is plain."""
    whole_shape: Shape
    """Of what a rank computes with: the parameter, or its tensor-parallel piece."""
    dim: int | None
    """Which dim the shard axis splits; None if every rank holds all of it."""
    ranges: tuple[tuple[Range, ...], ...]
    """For each rank along the shard axis, what it holds of the gathered one along `dim`."""
    index: int
    """This rank's position along the shard axis."""
    is_in_order: bool = True
    """Whether the gathered one is stored in the order of its dims."""

    @staticmethod
    def of(layout: Layout, info: DataParallelMeshInfo, is_in_order: bool = True) -> Division:
        """What a DTensor's layout says."""
        place = layout.mesh.get_coordinate()
        assert place is not None, "this rank is in its mesh"
        data = info.mesh.ndim
        whole = None
        whole_shape = layout.shape
        if layout.mesh.ndim > data:
            names = layout.mesh.mesh_dim_names
            assert names is not None, "a joint mesh has names"
            others = layout.mesh.root[names[data:]]
            order = [[axis - data for axis in axes if axis >= data] for axes in layout.shard_order]
            whole = Layout(others, layout.shape, order, None, layout.cuts if layout.is_cut else ())
            whole_shape = whole.local_shape()
        shard = info.shard_mesh_dim
        dims = [dim for dim, axes in enumerate(layout.shard_order) if shard in axes]
        if not dims or shard is None:
            nothing: tuple[Range, ...] = ()
            each = (nothing,) * info.shard_mesh_size
            rank = info.shard_mesh_rank
            return Division(layout, whole, whole_shape, None, each, rank, is_in_order)
        dim = dims[0]
        held = [(0, layout.shape[dim])] if whole is None else whole.ranges(dim)
        ranges = []
        for index in range(info.shard_mesh_size):
            there = (*place[:shard], index, *place[shard + 1 :])
            ranges.append(tuple(_within(held, layout.ranges(dim, there))))
        return Division(layout, whole, whole_shape, dim, tuple(ranges), place[shard], is_in_order)

    @property
    def count(self) -> int:
        """The number of ranks it is divided among."""
        return len(self.ranges)

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape of what each rank holds."""
        if self.dim is None:
            return (self.whole_shape,) * self.count
        lengths = [sum(stop - start for start, stop in ranges) for ranges in self.ranges]
        before, after = self.whole_shape[: self.dim], self.whole_shape[self.dim + 1 :]
        return tuple((*before, length, *after) for length in lengths)

    @cached_property
    def size(self) -> int:
        """The most elements that a rank holds."""
        return max(map(math.prod, self.shapes))

    @cached_property
    def is_even(self) -> bool:
        """Whether the ranks hold equal ranges, one after the other."""
        if self.dim is None:
            return False
        length = self.whole_shape[self.dim] // self.count
        each = [((index * length, (index + 1) * length),) for index in range(self.count)]
        return length > 0 and list(self.ranges) == each

    @property
    def _is_flat(self) -> bool:
        """Whether an even piece is one range of memory in the gathered one."""
        return self.dim == 0 and self.is_in_order

    def piece(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """What a rank holds, contiguous."""
        if self.dim is None:
            return whole.contiguous()
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges[index]]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].contiguous()

    def chunks(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """What each rank holds of a chunked one, as views; perhaps empty ones."""
        result = []
        for index in range(self.count):
            start, stop = chunk(0, self.whole_shape[0], self.count, index)
            result.append(whole.narrow(0, start, stop - start))
        return result

    def own(self, row: torch.Tensor, offset: int) -> torch.Tensor:
        """What this rank holds, in a row of its own."""
        shape, strides = self._own
        return row.as_strided(shape, strides, row.storage_offset() + offset)

    @cached_property
    def _own(self) -> tuple[Shape, Shape]:
        shape = self.shapes[self.index]
        return shape, _strides(shape)

    @cached_property
    def is_chunked(self) -> bool:
        """Whether it is split along its first dim as `torch.chunk` does."""
        if self.dim != 0 or not self.whole_shape[0]:
            return False
        size = self.whole_shape[0]
        each = [chunk(0, size, self.count, index) for index in range(self.count)]
        return [ranges or ((size, size),) for ranges in self.ranges] == [(one,) for one in each]

    # ---- views, in pairs: what belongs together has the same shape and position in two lists

    def of_whole(self, whole: torch.Tensor, by_rank: bool = False) -> list[torch.Tensor]:
        """The pieces of the gathered parameter, or of its gradient.

        Arguments:
            by_rank: give those of each rank by themselves, also if all can be one view.
        """
        if self.dim is None:
            return [whole]
        if self.is_even and not by_rank:
            if self._is_flat:
                return [whole.reshape(self.count, -1)]
            pieces = torch.unflatten(whole, self.dim, (self.count, -1))
            return [pieces.movedim(self.dim, 0)]
        return [
            whole.narrow(self.dim, start, stop - start)
            for ranges in self.ranges
            for start, stop in ranges
            if stop > start
        ]

    def of_rows(
        self, rows: torch.Tensor, offset: int, own_row: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Where those pieces lie in a buffer with a row of all parameters for each rank.

        Arguments:
            rows: two-dimensional and contiguous.
            offset: where this parameter begins in each row.
            own_row: this parameter's part of this rank's row, if that is not in the buffer; the
                pieces are then those that `of_whole` gives by rank.
        """
        if own_row is None:
            return [_view(rows, offset, piece) for piece in self._pieces]
        return [
            _view(own_row, 0, piece._replace(row=0))
            if piece.row == self.index
            else _view(rows, offset, piece)
            for piece in self._pieces_by_rank
        ]

    def of_gradient(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """The pieces of a gradient: of what every rank holds, one for every row."""
        if self.dim is None:
            return [gradient.expand(self.count, *self.whole_shape)]
        return self.of_whole(gradient)

    def of_gradient_rows(self, rows: torch.Tensor, offset: int) -> list[torch.Tensor]:
        """Where those lie in a buffer such as that of `of_rows`."""
        if self.dim is not None:
            return self.of_rows(rows, offset)
        return [_view(rows, offset, self._of_all_rows(self.whole_shape))]

    @cached_property
    def _pieces(self) -> list[_Piece]:
        if not self.is_even:
            return self._pieces_by_rank
        # as one dim, which the copy need not find out: it is done every time
        shape = self.shapes[0]
        return [self._of_all_rows((math.prod(shape),) if self._is_flat else shape)]

    @cached_property
    def _pieces_by_rank(self) -> list[_Piece]:
        if self.dim is None:
            strides = _strides(self.whole_shape)
            return [_Piece(self.whole_shape, strides, False, self.index, 0)]
        found = []
        for index, (shape, ranges) in enumerate(zip(self.shapes, self.ranges, strict=True)):
            strides = _strides(shape)
            at = 0
            for start, stop in ranges:
                if stop > start:
                    part = (*shape[: self.dim], stop - start, *shape[self.dim + 1 :])
                    found.append(_Piece(part, strides, False, index, at * strides[self.dim]))
                at += stop - start
        return found

    def _of_all_rows(self, shape: Shape) -> _Piece:
        return _Piece((self.count, *shape), _strides(shape), True, 0, 0)


class _Piece(NamedTuple):
    """A view of a buffer of rows."""

    shape: Shape
    strides: Shape
    is_of_all: bool
    """Whether its first dim, which `strides` lack, is that of the rows."""
    row: int
    start: int


def _view(rows: torch.Tensor, offset: int, piece: _Piece) -> torch.Tensor:
    length = rows.shape[-1]
    strides = (length, *piece.strides) if piece.is_of_all else piece.strides
    start = int(rows.storage_offset()) + offset + piece.row * length + piece.start
    return rows.as_strided(piece.shape, strides, start)


def _within(held: Sequence[Range], ranges: Sequence[Range]) -> list[Range]:
    """Ranges of the global tensor as ranges of a piece that holds `held` of it."""
    result = []
    for start, stop in ranges:
        offset = 0
        for first, end in held:
            if first <= start and stop <= end:
                result.append((offset + start - first, offset + stop - first))
                break
            offset += end - first
    return result


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether it fills its memory, in whatever order of dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _strides(shape: Shape) -> Shape:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)
