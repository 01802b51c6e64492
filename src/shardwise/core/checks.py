"""Checks of arguments for meshes.

Each function returns the canonical form of an argument, or raises an error that names it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardwise.core.errors import MeshError, format_value
from shardwise.core.world import Backend

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
    return tuple(map(str.__str__, names))  # plain texts, also of members of an enum


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


def as_backend(value: Any, argument: str) -> Backend:
    """Return how a process group is made: a backend's name, its options, or a tuple of both."""
    name, options = (value, None) if isinstance(value, str) else (None, value)
    if isinstance(value, tuple) and len(value) == 2:
        name, options = value
    has_name = name is None or (isinstance(name, str) and name)
    has_options = options is None or type(options).__module__.startswith("torch.")
    if not has_name or not has_options or value is None:
        raise MeshError(
            f"{argument}: expected a backend such as 'gloo', its options (a Backend.Options of "
            f"torch.distributed), or a tuple of both; got {format_value(value)}"
        )
    return Backend(None if name is None else name.lower(), options)


def as_backends(
    override: Mapping[Any, Any] | Sequence[Any] | None, names: tuple[str, ...] | None, ndim: int
) -> tuple[Backend, ...]:
    """Return how the process group of each axis is made.

    Arguments:
        override: a dict from axes, by name or position, to backends (`as_backend`), or a sequence
            with a tuple of name and options for each axis.
    """
    found = [Backend()] * ndim
    if override is None:
        return tuple(found)
    argument = "backend_override"
    if not isinstance(override, Mapping):
        if not isinstance(override, list | tuple) or len(override) != ndim:
            raise MeshError(
                f"{argument}: expected a dict from axes to backends, or a tuple of {ndim}, one per "
                f"axis; got {format_value(override)}"
            )
        return tuple(as_backend(each, f"{argument}[{i}]") for i, each in enumerate(override))
    seen = set()
    for key, value in override.items():
        axis = as_int(key)
        if isinstance(key, str):
            axis = names.index(key) if names is not None and key in names else None
        if axis is None or not 0 <= axis < ndim:
            axes = f"{names} or " if names else ""
            raise MeshError(
                f"{argument}: expected axes among {axes}0 to {ndim - 1}, got {format_value(key)}"
            )
        if axis in seen:
            raise MeshError(f"{argument}: expected each axis once, got axis {axis} and its name")
        seen.add(axis)
        found[axis] = as_backend(value, f"{argument}[{key!r}]")
    return tuple(found)
