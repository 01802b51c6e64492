"""Functions of torch that take a `DTensorSpec`, or a shape, a mesh and placements.

They are for code that reads torch's private modules, such as `torch.distributed.tensor._utils`.
Layouts do the same with fewer words: `Layout.from_placements(mesh, shape, placements).box()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from shardwise.core.errors import LayoutError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh, as_mesh
from shardwise.core.placement import Placement, Shard
from shardwise.dtensor.dtensor_spec import DTensorSpec, layout_of_spec
from shardwise.dtensor.shard_sizes import infer_layout
from shardwise.dtensor.tensor import DTensor
from shardwise.redistribute.autograd import redistribute_local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

Placements = Sequence[Placement]


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int],
    mesh: DeviceMesh | TorchMesh,
    placements: Placements,
    skip_offset: bool = False,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's shard, and where it begins in the global tensor.

    Arguments:
        global_shape: the shape of the global tensor.
        mesh: its mesh; on ranks outside of it the result is `((0,), ())`.
        placements: one per axis of the mesh.
        skip_offset: return `()` instead of the offsets.
    """
    mesh = as_mesh(mesh)
    if mesh.get_coordinate() is None:
        return (0,), ()
    layout = Layout.from_placements(mesh, global_shape, placements)
    shape = layout.local_shape()
    if skip_offset:
        return shape, ()
    split = [bool(axes) for axes in layout.shard_order]
    return shape, tuple(
        whole if is_split and not size else start
        for is_split, size, start, whole in zip(
            split, shape, layout.box().start, layout.shape, strict=True
        )
    )


def compute_local_tensor_info(
    global_tensor: torch.Tensor, mesh: DeviceMesh | TorchMesh, placements: Placements
) -> tuple[list[int], list[int]]:
    """Return the size and the strides of this rank's shard of a tensor."""
    layout = Layout.from_placements(as_mesh(mesh), global_tensor.shape, placements)
    shape = layout.local_shape()
    return list(shape), list(compute_local_stride(global_tensor.stride(), shape))


def compute_global_tensor_info(
    tensor: torch.Tensor, mesh: DeviceMesh | TorchMesh, placements: Placements
) -> tuple[list[int], list[int]]:
    """Return the global size and strides for shards of this size on every rank.

    Nothing is communicated: `compute_global_tensor_shape` is right for uneven shards, too.
    """
    mesh = as_mesh(mesh)
    shape = list(tensor.shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            shape[placement.dim] *= mesh.size(axis)
    return shape, list(compute_local_stride(tensor.stride(), shape))


def compute_global_tensor_shape(
    shape: Sequence[int], mesh: DeviceMesh | TorchMesh, placements: Placements
) -> torch.Size:
    """Return the global shape of shards, of which this rank's has the given shape.

    All ranks of the mesh call it and exchange their sizes. The mesh may have any number of axes.
    """
    like = torch.empty(tuple(shape), device="meta")
    return torch.Size(infer_layout(like, as_mesh(mesh), placements).shape)


def compute_local_stride(
    global_stride: Sequence[int], local_shape: Sequence[int]
) -> tuple[int, ...]:
    """Return the strides of a dense tensor of this shape, with dims in memory as in the global one.

    Arguments:
        global_stride: the strides of the global tensor.
        local_shape: the shape of the shard.
    """
    strides = [0] * len(global_stride)
    step = 1
    for dim in sorted(range(len(strides)), key=lambda dim: (global_stride[dim], -dim)):
        strides[dim] = step
        step *= local_shape[dim]
    return tuple(strides)


def normalize_to_torch_size(size: Any) -> torch.Size:
    """Return a size that was given as an int, as ints, or as a sequence of them."""
    if isinstance(size, int):
        return torch.Size([size])
    if len(size) == 1 and isinstance(size[0], Sequence):
        return torch.Size(size[0])
    return torch.Size(size)


def try_find_mesh_from_args(op_call: Any, args: Sequence[object]) -> DeviceMesh:
    """Return the mesh of the first DTensor or `DTensorSpec` among arguments, or in a list there.

    Arguments:
        op_call: the operator, for the error.
        args: its arguments.
    """
    for arg in args:
        first = arg[0] if isinstance(arg, list | tuple) and arg else arg
        if isinstance(first, DTensor | DTensorSpec):
            return first.device_mesh
    raise LayoutError(f"args: expected a DTensor among the arguments of {op_call}, got none")


# ---- moves


def redistribute_local_tensor(
    local_tensor: torch.Tensor,
    current_spec: DTensorSpec,
    target_spec: DTensorSpec,
    *,
    async_op: bool = False,
    use_graph_based_transform: bool | None = None,
    is_explicit: bool = False,
) -> torch.Tensor:
    """Move a shard from one spec to another; differentiable.

    `sw.redistribute_local` does the same with layouts.

    Arguments:
        local_tensor: this rank's shard. On a rank outside of the mesh it is returned.
        current_spec: of this shard.
        target_spec: of the result. It may be on another mesh.
        async_op: accepted because torch does; the result is complete. `x.redistribute(...,
            async_op=True)` of a DTensor returns at once.
        use_graph_based_transform: accepted because torch does; plans always have the least cost.
        is_explicit: accepted because torch does.
    """
    source, target = layout_of_spec(current_spec), layout_of_spec(target_spec)
    if source.mesh.get_coordinate() is None and target.mesh.get_coordinate() is None:
        return local_tensor
    moved: torch.Tensor = redistribute_local(local_tensor, source, target)
    return moved


@contextmanager
def use_min_cost_redistribution_plan(enabled: bool = True) -> Iterator[None]:
    """Return a context for programs that ask for plans of least cost, as all plans are here.

    In torch the context chooses between a greedy planner, its default, and a search. The values
    that are moved are the same with both.

    Arguments:
        enabled: accepted because torch does.
    """
    yield


@contextmanager
def disable_redistribute_transform_optimization(disabled: bool = True) -> Iterator[None]:
    """Return a context for programs that let torch's planner not merge collectives of several axes.

    Here a plan merges them where that takes less time, also within this context; the values are the
    same. `plan_redistribute(...).explain()` shows the steps of a plan.

    Arguments:
        disabled: accepted because torch does.
    """
    yield
