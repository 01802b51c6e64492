"""RankGrid: global ranks in a grid with named axes, and the arithmetic on it.

The base of `DeviceMesh`. An axis of another grid is described by how its positions step through the
list of all ranks of a grid (`Strides`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from shardwise.core import world
from shardwise.core.checks import as_int
from shardwise.core.errors import MeshError, also, format_value

if TYPE_CHECKING:
    from numpy.typing import NDArray

Axis = int | str
"""An axis of a mesh, by position or by name."""
Strides = tuple[tuple[int, int], ...]
"""How an axis steps through a list: pairs of size and stride, the first varying slowest. The
positions 0, 1, 4, 5 are ((2, 4), (2, 1)); an axis of size 1 is ()."""


class RankGrid:
    """Global ranks in a grid. `DeviceMesh` derives from it and fills the fields."""

    __slots__ = (
        "_coordinates",
        "_counts_from",
        "_ranks",
        "device_type",
        "is_abstract",
        "mesh_dim_names",
        "shape",
    )

    device_type: str
    is_abstract: bool
    mesh_dim_names: tuple[str, ...] | None
    shape: tuple[int, ...]
    _ranks: NDArray[np.int64]
    _counts_from: int | None
    """The first rank, if the ranks are consecutive numbers in the order of the grid."""
    _coordinates: dict[int, tuple[int, ...] | None]
    """The coordinates of the ranks that asked: threads of a simulation share the mesh."""

    @property
    def mesh(self) -> torch.Tensor:
        """The global ranks as an int32 tensor with one dimension per axis."""
        return torch.from_numpy(self._ranks.astype(np.int32))

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def size(self, mesh_dim: Axis | None = None) -> int:
        """Return the number of ranks, of the whole mesh or along one axis."""
        return math.prod(self.shape) if mesh_dim is None else self.shape[self.axis(mesh_dim)]

    def axis(self, axis: Axis) -> int:
        """Return the position of an axis given by name or position."""
        if isinstance(axis, str):
            if self.mesh_dim_names is not None and axis in self.mesh_dim_names:
                return self.mesh_dim_names.index(axis)
        elif (position := as_int(axis)) is not None and -self.ndim <= position < self.ndim:
            return position % self.ndim
        kind = also(MeshError, KeyError if isinstance(axis, str) else IndexError)
        raise kind(f"axis: expected one of {self.axes_shown()}, got {format_value(axis)}")

    def axis_name(self, axis: int) -> str:
        """Return the name of an axis; its position as digits if the axes have no names."""
        return str(axis) if self.mesh_dim_names is None else self.mesh_dim_names[axis]

    def has(self, coordinate: Sequence[int]) -> bool:
        """Return whether this is a coordinate of the grid: one position per axis, from 0."""
        # Planners call this for each peer: a loop, with the quick test (tuple) first, is fastest.
        if not isinstance(coordinate, tuple | Sequence) or len(coordinate) != len(self.shape):
            return False
        for place, size in zip(coordinate, self.shape, strict=True):
            index = as_int(place)
            if index is None or not 0 <= index < size:
                return False
        return True

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """Return the coordinate of a global rank, or None if the rank is not in the grid."""
        number = as_int(rank)
        if number is None:
            return None
        if self._counts_from is not None:
            index = number - self._counts_from
            inside = 0 <= index < self._ranks.size
            return tuple(map(int, np.unravel_index(index, self.shape))) if inside else None
        found = np.argwhere(self._ranks == number)
        return tuple(map(int, found[0])) if len(found) else None

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Return the global rank at a coordinate."""
        self._check_coordinate(coordinate)
        return int(self._ranks[tuple(coordinate)])

    def ranks_along(
        self, axes: Sequence[Axis], coordinate: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Return the ranks that differ from `coordinate` (default: this rank) only along `axes`.

        The position along the first of `axes` varies slowest.
        """
        coordinate = self._own_coordinate() if coordinate is None else coordinate
        if isinstance(axes, str) or not isinstance(axes, Sequence):
            raise MeshError(f"axes: expected a list of axes, got {format_value(axes)}")
        positions = [self.axis(axis) for axis in axes]
        if len(set(positions)) != len(positions):
            raise MeshError(f"axes: expected each axis once, got {tuple(axes)}")
        self._check_coordinate(coordinate)
        index = tuple(
            slice(None) if axis in positions else place for axis, place in enumerate(coordinate)
        )
        block = self._ranks[index]
        ascending = sorted(positions)
        order = [ascending.index(axis) for axis in positions]
        return tuple(map(int, block.transpose(order).flat))

    def _positions_of(self, ranks: Sequence[int]) -> NDArray[np.int64] | None:
        """Return where these ranks are in the list of all ranks, or None if one is not there."""
        wanted = np.asarray(ranks, dtype=np.int64)
        if self._counts_from is not None:
            found = wanted - self._counts_from
            inside = found.min() >= 0 and found.max() < self._ranks.size
            return found if inside else None
        listed = self._ranks.reshape(-1)
        order = np.argsort(listed)
        found = order[np.minimum(np.searchsorted(listed, wanted, sorter=order), len(order) - 1)]
        return found if (listed[found] == wanted).all() else None

    def axes_shown(self) -> str:
        """Return the names and sizes of the axes for messages: `(dp=2, tp=4)`."""
        names = self.mesh_dim_names or range(self.ndim)
        pairs = zip(names, self.shape, strict=True)
        return f"({', '.join(f'{name}={size}' for name, size in pairs)})"

    def _check_coordinate(self, coordinate: Sequence[int]) -> None:
        """Refuse a coordinate that is not in the grid."""
        if not self.has(coordinate):
            raise MeshError(
                f"coordinate: expected one within {self.shape}, got {format_value(coordinate)}"
            )

    # ---- the calling rank

    def get_rank(self) -> int:
        """Return the global rank of the caller (0 on an abstract mesh)."""
        return 0 if self.is_abstract else world.current().rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return the coordinate of the caller, or None if it is not in the mesh."""
        rank = self.get_rank()
        if rank not in self._coordinates:
            self._coordinates[rank] = self.coordinate_of(rank)
        return self._coordinates[rank]

    # torch's names, which other packages use

    def _get_mesh_dim_by_name(self, mesh_dim_name: str) -> int:
        return self.axis(mesh_dim_name)

    def _is_current_rank_part_of_mesh(self) -> bool:
        return self.get_coordinate() is not None

    def _sym_get_coordinate(self, index: int) -> int:
        return self._own_coordinate()[index]

    # helpers

    def _own_coordinate(self) -> tuple[int, ...]:
        coordinate = self.get_coordinate()
        if coordinate is None:
            raise MeshError(f"rank {self.get_rank()} is not part of {self!r}")
        return coordinate

    def _check_real(self, what: str) -> None:
        if self.is_abstract:
            raise MeshError(f"no {what}: {self!r} is abstract, it has no ranks behind it")

    def _one_axis(self, axis: Axis | None, method: str) -> int:
        if axis is not None:
            return self.axis(axis)
        if self.ndim != 1:
            raise MeshError(f"{method}(mesh_dim): expected one of {self.axes_shown()}, got None")
        return 0

    def _set_backends(self, backends: Sequence[world.Backend], first: int = 0) -> None:
        """Set how the process groups of axes are made, from the axis `first` on."""
        if self.is_abstract or self.get_coordinate() is None:
            return
        here = world.current()
        for axis, backend in enumerate(backends, first):
            here.set_backend(self.ranks_along([axis]), self.axis_name(axis), backend)


def strides_of(positions: NDArray[np.int64]) -> Strides | None:
    """Return how an axis with these positions steps; None if the steps are not regular."""
    offsets = positions - positions[0]
    pairs: list[tuple[int, int]] = []
    while len(offsets) > 1:
        steps = np.arange(len(offsets)) * offsets[1]
        irregular = np.flatnonzero(offsets != steps)
        size = int(irregular[0]) if len(irregular) else len(offsets)
        if offsets[1] <= 0 or len(offsets) % size:
            return None
        rows = offsets.reshape(-1, size)
        if (rows != rows[:, :1] + steps[:size]).any():
            return None
        pairs.insert(0, (size, int(offsets[1])))
        offsets = rows[:, 0]
    return tuple(pairs)


def form_a_grid(axes: Sequence[Strides], count: int) -> bool:
    """Return whether axes divide a list of `count` ranks into grids that do not overlap.

    They do if their steps are places of one number system: each stride is a multiple of the range
    that the next smaller one covers. This does not depend on a rank, so all ranks agree.
    """
    covered = 1
    for stride, size in sorted((stride, size) for each in axes for size, stride in each):
        if stride % covered:
            return False
        covered = stride * size
    return count % covered == 0


def grid_around(position: int, axes: Sequence[Strides]) -> NDArray[np.int64]:
    """Return the positions in the grid of these axes that contains `position`."""
    pairs = [pair for each in axes for pair in each]
    first = position - sum(position // stride % size * stride for size, stride in pairs)
    grid = np.array(first, dtype=np.int64)
    for size, stride in pairs:
        grid = np.add.outer(grid, np.arange(size) * stride)
    return grid.reshape([math.prod(size for size, _ in each) for each in axes])
