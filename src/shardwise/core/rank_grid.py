"""RankGrid: global ranks in a grid with named axes, and the arithmetic on it.

The base of `DeviceMesh`. Nothing here asks which rank the caller is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from shardwise.core.checks import as_int
from shardwise.core.errors import MeshError, format_value

if TYPE_CHECKING:
    from numpy.typing import NDArray

Axis = int | str
"""An axis of a mesh, by position or by name."""


class RankGrid:
    """Global ranks in a grid. `DeviceMesh` derives from it and fills the fields."""

    __slots__ = ("_counts_from", "_ranks", "mesh_dim_names", "shape")

    mesh_dim_names: tuple[str, ...] | None
    shape: tuple[int, ...]
    _ranks: NDArray[np.int64]
    _counts_from: int | None
    """The first rank, if the ranks are consecutive numbers in the order of the grid."""

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
        raise MeshError(f"axis: expected one of {self.axes_shown()}, got {format_value(axis)}")

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

    def _ranks_from(self, axes: Sequence[Axis], coordinate: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks that differ from `coordinate` only along `axes`.

        The position along the first of `axes` varies slowest.
        """
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
