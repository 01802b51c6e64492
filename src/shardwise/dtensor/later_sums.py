"""Parameters whose gradients are summed over some axes after the backward, and not by operators.

`fully_shard(dp_mesh_dims=)` lets modules compute with DTensors on a mesh that has the data-parallel
axes too. It reduces their gradients itself, after the backward. An operator that uses such a
parameter beside data that is split over these axes must then leave the gradient as it is: each
rank's contribution. The same holds for what is computed from such parameters only, such as
`weight.t()`. Other tensors, such as the mean of a batch, need the sum where they are used.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from shardwise.core.errors import DispatchError
from shardwise.core.mesh import DeviceMesh
from shardwise.core.tensor_state import ensure_state, state_of
from shardwise.redistribute.autograd import find_move

data_axes: WeakKeyDictionary[DeviceMesh, tuple[int, ...]] = WeakKeyDictionary()
"""Meshes with such parameters, and the axes over which gradients of some of them are summed
later."""

_MOST_NODES = 512
"""How far the history of a tensor is searched for parameters."""


def sum_later(leaf: torch.Tensor, mesh: DeviceMesh, axes: tuple[int, ...]) -> None:
    """Leave the gradient of a leaf as contributions on some axes of its mesh."""
    ensure_state(leaf).summed_later = axes
    data_axes[mesh] = tuple(sorted({*data_axes.get(mesh, ()), *axes}))


def find_later_sums(
    tensor: Any, used_on: tuple[int, ...], axes: tuple[int, ...], operator: str
) -> tuple[int, ...]:
    """Return the axes on which the gradient of an input stays a contribution. The answer is the
    same on every rank. Runs within `as_local()`.

    Arguments:
        used_on: the axes on which the gradient of the input is a contribution.
        axes: those of `data_axes`.
        operator: the name of the called operator, for messages.
    """
    if not set(used_on) & set(axes):
        return ()
    found: set[tuple[int, ...]] = set()
    nodes = [tensor.grad_fn]
    if tensor.is_leaf:
        nodes, found = [], {_axes_of(tensor)}
    seen: set[Any] = set()
    while nodes and len(seen) < _MOST_NODES:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.add(_axes_of(leaf))
        elif _communicates(node, axes):
            found.add(())
        else:
            nodes += [each for each, _ in node.next_functions]
    if nodes:
        raise DispatchError(
            f"{operator}: the history of an input is too long ({_MOST_NODES} operators and more) "
            "to tell whether it was computed from parameters of fully_shard(dp_mesh_dims=) only, "
            "whose gradients are summed over ranks after the backward. Give fully_shard the "
            "data-parallel mesh only, without dp_mesh_dims"
        )
    if len(found) > 1 and any(found):
        raise DispatchError(
            f"{operator}: an input was computed from parameters of fully_shard(dp_mesh_dims=), "
            "whose gradients are summed over ranks after the backward, and from other tensors, "
            "whose gradients are summed at once. Use the parameter and the other tensor in "
            "separate operators with the split data, or give fully_shard the data-parallel mesh "
            "only, without dp_mesh_dims"
        )
    return tuple(axis for axis in next(iter(found), ()) if axis in used_on)


def _axes_of(leaf: torch.Tensor) -> tuple[int, ...]:
    notes = state_of(leaf)
    return () if notes is None else notes.summed_later


def _communicates(node: Any, axes: tuple[int, ...]) -> bool:
    """Return whether a node of the graph is a move on these axes, as a sum over a batch is."""
    pair = find_move(node)
    if pair is None:
        return False
    source, target = pair.forward.source, pair.forward.target
    if source.mesh is not target.mesh:
        return True
    return any(
        source.placements[axis] != target.placements[axis]
        or pair.backward.source.placements[axis] != pair.backward.target.placements[axis]
        for axis in axes
    )
