"""Checks of arguments for meshes.

Each function returns the canonical form of an argument, or raises an error that names it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardwise.core.errors import MeshError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def as_int(value: Any) -> int | None:
    """Return a plain int for an integer of any type, such as numpy's; None for bools and all
    else."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_ints(values: Any) -> tuple[int, ...] | None:
    """Return plain ints for a sequence of integers of any type; None for all else."""
    if not isinstance(values, Sequence):
        return None
    ints = tuple(value for value in map(as_int, values) if value is not None)
    return ints if len(ints) == len(values) else None


def check_names(names: tuple[str, ...] | None, ndim: int) -> None:
    """Check the axis names of a mesh; None means that the axes have no names."""
    if names is None:
        return
    if not all(isinstance(name, str) and name.isascii() and name.isidentifier() for name in names):
        raise MeshError(f"mesh_dim_names: expected identifiers in ASCII such as 'tp', got {names}")
    if len(names) != ndim:
        raise MeshError(f"mesh_dim_names: expected {ndim} names, one per axis; got {names}")
    if len(set(names)) != len(names):
        raise MeshError(f"mesh_dim_names: expected different names, got {names}")


def as_device_type(device_type: str) -> str:
    """Return a device type such as "cpu"; a device with an index is refused."""
    try:
        device = torch.device(device_type)
    except (RuntimeError, TypeError) as error:
        raise MeshError(f"device_type: expected 'cpu', 'cuda' or alike; {error}") from None
    if device.index is not None:
        raise MeshError(f"device_type: expected no device index, got {device_type!r}")
    return device.type


def as_mesh_shape(shape: Sequence[int], argument: str) -> tuple[int, ...]:
    """Return the sizes of the axes of a mesh."""
    sizes = as_ints(shape)
    if not sizes or min(sizes) < 1:
        raise MeshError(f"{argument}: expected positive sizes, one per axis; got {shape!r}")
    return sizes


def as_ranks(mesh: torch.Tensor | Sequence[Any] | NDArray[Any]) -> NDArray[np.int64]:
    """Return a grid of ranks as an array in which each rank occurs once."""
    try:
        array = mesh.detach().cpu().numpy() if isinstance(mesh, torch.Tensor) else np.asarray(mesh)
    except ValueError:  # rows of different lengths
        array = np.empty(0)
    if array.size == 0 or array.ndim == 0 or not np.issubdtype(array.dtype, np.integer):
        raise MeshError(f"mesh: expected a grid of ranks such as [[0, 1], [2, 3]], got {mesh!r}")
    ranks = array.astype(np.int64)
    if len(np.unique(ranks)) != ranks.size:
        raise MeshError(f"mesh: expected each rank once, got {ranks.tolist()}")
    return ranks
