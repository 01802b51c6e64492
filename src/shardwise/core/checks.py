"""Checks of arguments for meshes.

Each function returns the canonical form of an argument, or raises an error that names it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardwise.core.errors import MeshError, format_value

if TYPE_CHECKING:
    from numpy.typing import NDArray


_MOST = 2**63
"""Torch has integers of 64 bits."""


def as_int(value: Any) -> int | None:
    """Return a plain int for an integer of any type, such as numpy's; None for bools, for integers
    of more than 64 bits, and all else."""
    if type(value) is not int:
        if isinstance(value, bool):
            return None
        try:
            value = operator.index(value)
        except (TypeError, RuntimeError):  # RuntimeError: a tensor without data
            return None
    return value if -_MOST <= value < _MOST else None


def as_ints(values: Any) -> tuple[int, ...] | None:
    """Return plain ints for a sequence of integers of any type; None for all else."""
    if not isinstance(values, Sequence):
        return None
    ints = tuple(value for value in map(as_int, values) if value is not None)
    return ints if len(ints) == len(values) else None


def as_names(names: Sequence[str] | None, ndim: int) -> tuple[str, ...] | None:
    """Return the names of the axes of a mesh; None means that the axes have no names."""
    if names is None:
        return None
    given = format_value(names)
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise MeshError(f"mesh_dim_names: expected a tuple such as ('dp', 'tp'), got {given}")
    if not all(isinstance(name, str) and name for name in names):
        raise MeshError(f"mesh_dim_names: expected texts such as 'tp', got {given}")
    if len(names) != ndim:
        raise MeshError(f"mesh_dim_names: expected {ndim} names, one per axis; got {given}")
    if len(set(names)) != len(names):
        raise MeshError(f"mesh_dim_names: expected different names, got {given}")
    return tuple(names)


def as_device_type(device_type: str) -> str:
    """Return a device type such as "cpu"; a device with an index is refused."""
    try:
        device = torch.device(device_type)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise MeshError(f"device_type: expected 'cpu', 'cuda' or alike; {error}") from None
    if device.index is not None:
        raise MeshError(f"device_type: expected no device index, got {format_value(device_type)}")
    return device.type


def as_mesh_shape(shape: Sequence[int], argument: str) -> tuple[int, ...]:
    """Return the sizes of the axes of a mesh."""
    sizes = as_ints(shape)
    if not sizes or min(sizes) < 1:
        raise MeshError(
            f"{argument}: expected positive sizes, one per axis; got {format_value(shape)}"
        )
    return sizes


def as_ranks(mesh: torch.Tensor | Sequence[Any] | NDArray[Any]) -> NDArray[np.int64]:
    """Return a grid of ranks as an array in which each rank occurs once."""
    try:
        array = mesh.detach().cpu().numpy() if isinstance(mesh, torch.Tensor) else np.asarray(mesh)
    except (ValueError, TypeError, RuntimeError):  # rows of different lengths, no data, ...
        array = np.empty(0)
    if array.size == 0 or array.ndim == 0 or not np.issubdtype(array.dtype, np.integer):
        raise MeshError(
            f"mesh: expected a grid of ranks such as [[0, 1], [2, 3]], got {format_value(mesh)}"
        )
    ranks = array.astype(np.int64)
    if len(np.unique(ranks)) != ranks.size:
        raise MeshError(f"mesh: expected each rank once, got {ranks.tolist()}")
    return ranks
