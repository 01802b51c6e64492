"""How one parameter is sharded: which part of it each data-parallel rank holds.

The DTensor of a sharded parameter is laid out on the data-parallel axes and, if the module is
tensor-parallel, on those axes too. Tensor parallelism splits first: the tensor that a rank gathers
is the tensor-parallel shard that it computes with. The layout of the gathered parameter, and the
ranges that each rank holds, follow from the DTensor's own layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from shardwise.core.box import Range, chunk
from shardwise.core.errors import MeshError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.dtensor.tensor import DTensor, unwrap, wrap
from shardwise.fsdp.errors import FSDPError
from shardwise.fsdp.mesh_info import DataParallelMeshInfo
from shardwise.redistribute import redistribute_local

Shape = tuple[int, ...]


def sharded_layout(
    tensor: torch.Tensor, info: DataParallelMeshInfo, dim: int | None, name: str
) -> Layout:
    """Return the layout of a parameter that is split along `dim` (None: not at all) over the shard
    axis."""
    if not isinstance(tensor, DTensor):
        split = {} if dim is None or info.shard_mesh_dim is None else {dim: [info.shard_mesh_dim]}
        return Layout(info.mesh, tensor.shape, split)
    before = tensor._layout
    if before.partial:
        raise FSDPError(f"{name}: expected no pending sums, got {before!r}; redistribute it first")
    other_axes = _other_axes(before.mesh, info)
    if info.spmd_mesh is None:
        mesh = _joint_mesh(info.mesh, before.mesh, name)
    else:
        _check_whole_on_data_axes(before, info, name)
        names = before.mesh.mesh_dim_names
        assert names is not None, "dp_mesh_dims has named some"
        mesh = info.mesh
        if other_axes:
            others = before.mesh[tuple(names[axis] for axis in other_axes)]
            mesh = _joint_mesh(info.mesh, others, name)
    # The data-parallel axes come first.
    moved = {axis: info.mesh.ndim + index for index, axis in enumerate(other_axes)}
    order = [[moved[axis] for axis in axes] for axes in before.shard_order]
    if dim is not None and info.shard_mesh_dim is not None:
        order[dim].append(info.shard_mesh_dim)
    cuts = before.cuts if before.is_cut else ()
    return Layout(mesh, before.shape, order, None, cuts)


def is_on_all_axes(tensor: torch.Tensor, info: DataParallelMeshInfo) -> bool:
    """Return whether a parameter is a DTensor on the mesh that has the data-parallel axes too."""
    return isinstance(tensor, DTensor) and tensor._layout.mesh is info.spmd_mesh


def _other_axes(mesh: DeviceMesh, info: DataParallelMeshInfo) -> list[int]:
    """Return the axes of a parameter's mesh that are not data-parallel."""
    data = () if info.spmd_mesh is None else info.spmd_axes
    return [axis for axis in range(mesh.ndim) if axis not in data]


def _check_whole_on_data_axes(layout: Layout, info: DataParallelMeshInfo, name: str) -> None:
    for axis in info.spmd_axes:
        if not layout.placements[axis].is_replicate():
            raise FSDPError(
                f"{name}: expected Replicate() on {layout.mesh.axis_name(axis)!r}, an axis that "
                f"dp_mesh_dims names, got {layout.placements[axis]} in {layout!r}; fully_shard "
                "splits it there"
            )


def _joint_mesh(data: DeviceMesh, other: DeviceMesh, name: str) -> DeviceMesh:
    """Return the mesh with the data-parallel axes and those that a DTensor is laid out on."""
    names, others = data.mesh_dim_names, other.mesh_dim_names
    if names is None or others is None:
        raise FSDPError(
            f"{name}: it is a DTensor on {other!r}, and mesh is {data!r}; expected two parts of "
            "one mesh with names, such as mesh['dp'] beside mesh['tp']"
        )
    both = [axis for axis in names if axis in others]
    if both:
        raise FSDPError(
            f"{name}: it is a DTensor on {other!r} already, which has axis {both[0]!r} of mesh; "
            "lay out the model on the other axes only, such as mesh['tp']"
        )
    try:
        return DeviceMesh.concatenate([data, other])
    except MeshError as error:
        raise FSDPError(f"{name}: it is a DTensor, and {error}") from None


def gather_buffer(buffer: DTensor, info: DataParallelMeshInfo) -> torch.Tensor:
    """Return a buffer that is laid out as a shard, such as a mask, as modules compute with it."""
    before = buffer._layout
    gathered = ParamSharding.of(before, info).gathered_layout
    if gathered is None:
        return buffer.full_tensor()
    data_axes = info.mesh.ndim
    order = [[axis for axis in axes if axis >= data_axes] for axes in before.shard_order]
    whole = before.relaid(shard_order=order, partial={}, cuts=before.cuts)
    return wrap(redistribute_local(unwrap(buffer), before, whole), gathered)


@dataclass(frozen=True)
class ParamSharding:
    """Which part of a parameter each rank along the shard axis holds.

    Example:
        A parameter of shape (5, 3), split along dim 0 over two ranks, has `ranges`
        (((0, 3),), ((3, 5),)) and `shapes` ((3, 3), (2, 3)).
    """

    gathered_layout: Layout | None
    """Of the gathered parameter, on the other axes or on all; None for a plain tensor."""
    gathered_shape: Shape
    """Of the tensor that a rank computes with: the parameter, or its tensor-parallel shard."""
    dim: int | None
    """The dim that the shard axis splits; None if every rank holds the entire parameter."""
    ranges: tuple[tuple[Range, ...], ...]
    """For each rank along the shard axis, the ranges of the gathered parameter along `dim`."""
    index: int
    """This rank's index along the shard axis."""
    is_contiguous: bool = True
    """Whether the gathered parameter is contiguous."""

    @staticmethod
    def of(layout: Layout, info: DataParallelMeshInfo, is_contiguous: bool = True) -> ParamSharding:
        """Derive the sharding from the layout of the DTensor that the module has at rest."""
        coordinate = layout.mesh.get_coordinate()
        assert coordinate is not None, "this rank is in its mesh"
        data_axes = info.mesh.ndim
        gathered = None
        gathered_shape = layout.shape
        if layout.mesh.ndim > data_axes or info.spmd_mesh is not None:
            other_mesh = info.spmd_mesh
            if other_mesh is None:
                other_mesh = layout.mesh.along(range(data_axes, layout.mesh.ndim), coordinate)
            axis_of = _other_axes(other_mesh, info)
            order = [
                [axis_of[axis - data_axes] for axis in axes if axis >= data_axes]
                for axes in layout.shard_order
            ]
            cuts = layout.cuts if layout.is_cut else ()
            gathered = Layout(other_mesh, layout.shape, order, None, cuts)
            gathered_shape = gathered.local_shape()
        shard = info.shard_mesh_dim
        dims = [dim for dim, axes in enumerate(layout.shard_order) if shard in axes]
        dim = dims[0] if dims and shard is not None else None
        ranges: list[tuple[Range, ...]] = [()] * info.shard_mesh_size
        if dim is not None and shard is not None:
            available = [(0, layout.shape[dim])] if gathered is None else gathered.ranges(dim)
            for index in range(info.shard_mesh_size):
                other = (*coordinate[:shard], index, *coordinate[shard + 1 :])
                ranges[index] = tuple(_ranges_within(available, layout.ranges(dim, other)))
        rank = info.shard_mesh_rank
        return ParamSharding(gathered, gathered_shape, dim, tuple(ranges), rank, is_contiguous)

    @property
    def count(self) -> int:
        """The number of ranks along the shard axis."""
        return len(self.ranges)

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape of each rank's shard."""
        if self.dim is None:
            return (self.gathered_shape,) * self.count
        lengths = [sum(stop - start for start, stop in ranges) for ranges in self.ranges]
        before, after = self.gathered_shape[: self.dim], self.gathered_shape[self.dim + 1 :]
        return tuple((*before, length, *after) for length in lengths)

    @cached_property
    def size(self) -> int:
        """The number of elements of the largest shard."""
        return max(map(math.prod, self.shapes))

    @cached_property
    def is_even(self) -> bool:
        """Whether the ranks hold equal ranges, in the order of ranks."""
        if self.dim is None:
            return False
        length = self.gathered_shape[self.dim] // self.count
        each = [((index * length, (index + 1) * length),) for index in range(self.count)]
        return length > 0 and list(self.ranges) == each

    @property
    def _is_flat(self) -> bool:
        """Whether an even shard is one range of the gathered parameter's memory."""
        return self.dim == 0 and self.is_contiguous

    def shard_of_rank(self, gathered: torch.Tensor, index: int) -> torch.Tensor:
        """Return the shard of a rank, contiguous."""
        if self.dim is None:
            return gathered.contiguous()
        parts = [
            gathered.narrow(self.dim, start, stop - start) for start, stop in self.ranges[index]
        ]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].contiguous()

    def chunks(self, gathered: torch.Tensor) -> list[torch.Tensor]:
        """Return each rank's shard as a view, if `is_chunked`; some may be empty."""
        result = []
        for index in range(self.count):
            start, stop = chunk(0, self.gathered_shape[0], self.count, index)
            result.append(gathered.narrow(0, start, stop - start))
        return result

    def own_shard(self, row: torch.Tensor, offset: int) -> torch.Tensor:
        """Return this rank's shard as a view of its row, in which it begins at `offset`."""
        shape, strides = self._own_shape
        return row.as_strided(shape, strides, row.storage_offset() + offset)

    @cached_property
    def _own_shape(self) -> tuple[Shape, Shape]:
        shape = self.shapes[self.index]
        return shape, _strides(shape)

    @cached_property
    def is_chunked(self) -> bool:
        """Whether the parameter is split along dim 0 into the chunks of `torch.chunk`."""
        if self.dim != 0 or not self.gathered_shape[0]:
            return False
        size = self.gathered_shape[0]
        each = [chunk(0, size, self.count, index) for index in range(self.count)]
        return [ranges or ((size, size),) for ranges in self.ranges] == [(one,) for one in each]

    # ---- Views for fused copies, in pairs of lists: `pieces_of_gathered` goes with
    # `pieces_of_rows`, `pieces_of_grad` with `pieces_of_grad_rows`. Pieces at the same position of
    # both lists have the same shape.

    def pieces_of_gathered(
        self, gathered: torch.Tensor, by_rank: bool = False
    ) -> list[torch.Tensor]:
        """Return the ranks' pieces of the gathered parameter, or of its gradient.

        Arguments:
            by_rank: return a view for each rank, even if one view can hold all.
        """
        if self.dim is None:
            return [gathered]
        if self.is_even and not by_rank:
            if self._is_flat:
                return [gathered.reshape(self.count, -1)]
            pieces = torch.unflatten(gathered, self.dim, (self.count, -1))
            return [pieces.movedim(self.dim, 0)]
        return [
            gathered.narrow(self.dim, start, stop - start)
            for ranges in self.ranges
            for start, stop in ranges
            if stop > start
        ]

    def pieces_of_rows(
        self, rows: torch.Tensor, offset: int, own_row: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Return the same pieces as views of a buffer that has a row for each rank.

        Arguments:
            rows: two-dimensional and contiguous.
            offset: where this parameter begins in each row.
            own_row: this parameter's part of this rank's row, if that is not in the buffer; the
                pieces then match those of `pieces_of_gathered(by_rank=True)`.
        """
        if own_row is None:
            return [_view(rows, offset, piece) for piece in self._pieces]
        return [
            _view(own_row, 0, piece._replace(row=0))
            if piece.row == self.index
            else _view(rows, offset, piece)
            for piece in self._pieces_by_rank
        ]

    def pieces_of_grad(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Return the ranks' pieces of a gradient; a replicated parameter's goes to every rank."""
        if self.dim is None:
            return [gradient.expand(self.count, *self.gathered_shape)]
        return self.pieces_of_gathered(gradient)

    def pieces_of_grad_rows(self, rows: torch.Tensor, offset: int) -> list[torch.Tensor]:
        """Return the same pieces as views of a buffer that has a row for each rank."""
        if self.dim is not None:
            return self.pieces_of_rows(rows, offset)
        return [_view(rows, offset, self._piece_of_all_rows(self.gathered_shape))]

    @cached_property
    def _pieces(self) -> list[_RowPiece]:
        if not self.is_even:
            return self._pieces_by_rank
        # A flat piece is one-dimensional already, so that the copy need not merge dims each time.
        shape = self.shapes[0]
        return [self._piece_of_all_rows((math.prod(shape),) if self._is_flat else shape)]

    @cached_property
    def _pieces_by_rank(self) -> list[_RowPiece]:
        if self.dim is None:
            strides = _strides(self.gathered_shape)
            return [_RowPiece(self.gathered_shape, strides, False, self.index, 0)]
        found = []
        for index, (shape, ranges) in enumerate(zip(self.shapes, self.ranges, strict=True)):
            strides = _strides(shape)
            position = 0
            for start, stop in ranges:
                if stop > start:
                    part = (*shape[: self.dim], stop - start, *shape[self.dim + 1 :])
                    begin = position * strides[self.dim]
                    found.append(_RowPiece(part, strides, False, index, begin))
                position += stop - start
        return found

    def _piece_of_all_rows(self, shape: Shape) -> _RowPiece:
        return _RowPiece((self.count, *shape), _strides(shape), True, 0, 0)


class _RowPiece(NamedTuple):
    """A view of a buffer of rows, relative to where a parameter begins in them."""

    shape: Shape
    strides: Shape
    spans_rows: bool
    """Whether the first dim, which `strides` omits, goes over the rows."""
    row: int
    start: int


def _view(rows: torch.Tensor, offset: int, piece: _RowPiece) -> torch.Tensor:
    length = rows.shape[-1]
    strides = (length, *piece.strides) if piece.spans_rows else piece.strides
    start = int(rows.storage_offset()) + offset + piece.row * length + piece.start
    return rows.as_strided(piece.shape, strides, start)


def _ranges_within(available: Sequence[Range], ranges: Sequence[Range]) -> list[Range]:
    """Map ranges of the global tensor to ranges of a shard that consists of `available`."""
    result = []
    for start, stop in ranges:
        offset = 0
        for first, end in available:
            if first <= start and stop <= end:
                result.append((offset + start - first, offset + stop - first))
                break
            offset += end - first
    return result


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor fills its memory without gaps, in any order of dims."""
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
