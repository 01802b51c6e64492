"""Calls of process groups with DTensors, and functional collectives over our meshes.

DTensors are checked where every function of torch.distributed ends. All of them
(`dist.all_reduce`, `P2POp`, `torch.distributed.nn`, the coalesced ones, also if they were imported
before shardwise) call a method of `ProcessGroup`, and so may a user.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.core.errors import MeshError, also
from shardwise.core.mesh import DeviceMesh
from shardwise.dispatch.collectives import check_read, check_written, note_written
from shardwise.dtensor.tensor import DTensor, tensors_in
from shardwise.torch_internals import (
    ProcessGroupBackend,
    base_of,
    broadcast_coalesced,
    constant_when_compiled,
    is_torch_function_enabled,
    world_of_torch,
)
from shardwise.torch_patches.patch import Patch, Undo, replace, undo_all, when_imported


@dataclass(frozen=True, slots=True)
class _GroupMethod:
    """What a method of a process group does with its tensors."""

    function: str
    """The name of the function of torch.distributed."""
    writes: bool
    """Whether the first argument is written to."""
    gives_all_the_same: bool = False
    """Whether all ranks get the same values."""
    is_elementwise: bool = False
    """Whether a value depends on the same element of each rank alone."""


_ALL_REDUCE = _GroupMethod("all_reduce", writes=True, gives_all_the_same=True, is_elementwise=True)
_BROADCAST = _GroupMethod("broadcast", writes=True, gives_all_the_same=True, is_elementwise=True)
_ALL_GATHER = _GroupMethod("all_gather", writes=True, gives_all_the_same=True)
_REDUCE_SCATTER = _GroupMethod("reduce_scatter", writes=True)
_ALL_TO_ALL = _GroupMethod("all_to_all", writes=True)
_RECV = _GroupMethod("recv", writes=True)

METHODS: dict[str, _GroupMethod] = {
    "allreduce": _ALL_REDUCE,
    "allreduce_coalesced": _ALL_REDUCE,
    "broadcast": _BROADCAST,
    "reduce": _GroupMethod("reduce", writes=True),
    "allgather": _ALL_GATHER,
    "allgather_coalesced": _ALL_GATHER,
    "allgather_into_tensor_coalesced": _ALL_GATHER,
    "all_gather_single": _ALL_GATHER,
    "all_gather_single_coalesced": _ALL_GATHER,
    "_allgather_base": _ALL_GATHER,
    "gather": _GroupMethod("gather", writes=True),
    "gather_single": _GroupMethod("gather", writes=True),  # since torch 2.15
    "scatter": _GroupMethod("scatter", writes=True),
    "reduce_scatter": _REDUCE_SCATTER,
    "reduce_scatter_single": _REDUCE_SCATTER,
    "reduce_scatter_single_coalesced": _REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": _REDUCE_SCATTER,
    "_reduce_scatter_base": _REDUCE_SCATTER,
    "alltoall": _ALL_TO_ALL,
    "alltoall_base": _ALL_TO_ALL,
    "all_to_all_single": _ALL_TO_ALL,
    "send": _GroupMethod("send", writes=False),
    "recv": _RECV,
    "recv_anysource": _RECV,
}
"""The methods of a process group. All arguments are sent but the first, if that is written to."""


def _guard_process_groups() -> Undo:
    threaded = "torch.testing._internal.distributed.multi_threaded_pg"
    undos = [
        _guard(ProcessGroup),
        _guard(ProcessGroupBackend),
        # Python's own methods of the group whose ranks are threads
        when_imported(threaded, lambda module: _guard(module.ProcessLocalGroup)),
    ]
    coalesced = broadcast_coalesced

    @functools.wraps(coalesced)
    def checked_broadcast(group: Any, tensors: Any, *args: Any) -> None:
        if _involves_dtensors((tensors,)):
            _check(group, _BROADCAST, (tensors,))
        coalesced(group, tensors, *args)

    return undo_all([*undos, replace(dist, "_broadcast_coalesced", checked_broadcast)])


def _guard(kind: type) -> Undo:
    """Check the arguments of all collectives of a class of groups."""
    own = vars(kind)
    names = [name for name in METHODS if name in own]
    return undo_all([replace(kind, name, _checked(own[name], METHODS[name])) for name in names])


def _checked(method: Any, call: _GroupMethod) -> Any:
    bind = method.__get__

    def checked(group: Any, *args: Any, **kwargs: Any) -> Any:
        if _involves_dtensors(args) or (kwargs and _involves_dtensors(kwargs.values())):
            _check(group, call, (*args, *(kwargs[name] for name in sorted(kwargs, key=_is_read))))
        return bind(group)(*args, **kwargs)

    return functools.wraps(method)(checked)


def _is_read(keyword: str) -> bool:
    """Tell whether a keyword is not that of the argument that is written to."""
    return keyword.endswith("sizes") or not keyword.startswith(("output", "tensor"))


def _involves_dtensors(args: Iterable[Any]) -> bool:
    """Tell whether tensors among the arguments are DTensors, aliases of them, or have notes."""
    for arg in args:
        if isinstance(arg, list | tuple):
            if _involves_dtensors(arg):
                return True
        elif isinstance(arg, torch.Tensor) and (arg.__dict__ or isinstance(base_of(arg), DTensor)):
            return True
    return False


def _check(group: Any, call: _GroupMethod, args: tuple[Any, ...]) -> None:
    if not is_torch_function_enabled():
        return
    name = f"torch.distributed.{call.function}"
    sent = args[1:] if call.writes else args
    for tensor in tensors_in(sent):
        if isinstance(tensor, DTensor):
            check_read(name, tensor)
    written = list(tensors_in(args[:1])) if call.writes else []
    ranks = _ranks_of(group) if call.gives_all_the_same else None
    for tensor in written:
        if isinstance(tensor, DTensor):
            check_written(name, tensor, ranks, call.is_elementwise)
    for tensor in written:
        note_written(tensor)


def _ranks_of(group: Any) -> tuple[int, ...] | None:
    """Return the ranks of a group; None if torch does not know it, as for the backend of one."""
    known = world_of_torch().pg_group_ranks.get(group)
    return None if known is None else tuple(sorted(known))


# ---- meshes as groups of functional collectives


def _take_our_meshes() -> Undo:
    return when_imported("torch.distributed._functional_collectives", _resolve_our_meshes)


def _resolve_our_meshes(module: ModuleType) -> Undo:
    # All functions of the module, and `_resolve_group_name`, find the group by one of these.
    names = ("_resolve_group", "_expand_group")
    resolve, expand = (getattr(module, name) for name in names)

    @functools.wraps(resolve)
    def resolve_ours(group: Any, tag: str = "") -> Any:
        return _group_name(*_mesh_and_axis(group)) if _is_ours(group) else resolve(group, tag)

    @functools.wraps(expand)
    def expand_ours(group: Any, tag: str = "") -> Any:
        if _is_ours(group):
            mesh, axis = _mesh_and_axis(group)
            group = mesh.get_group(axis)
        return expand(group, tag)

    ours = (resolve_ours, expand_ours)
    return undo_all([replace(module, *pair) for pair in zip(names, ours, strict=True)])


def _is_ours(group: Any) -> bool:
    """Tell whether a group is a mesh of ours, or such a mesh and an axis."""
    is_pair = isinstance(group, tuple) and len(group) == 2
    return isinstance(group[0] if is_pair else group, DeviceMesh)


def _mesh_and_axis(group: Any) -> tuple[DeviceMesh, Any]:
    if isinstance(group, tuple):
        mesh, axis = group
        return mesh, axis
    if group.ndim != 1:
        raise also(MeshError, AssertionError)(
            f"group: expected a mesh with one axis, got {group!r}; say over which axis, as in "
            f"(mesh, {group.axis_name(0)!r}) or mesh[{group.axis_name(0)!r}], or use mesh.flatten()"
        )
    return group, 0


@constant_when_compiled
def _group_name(mesh: DeviceMesh, axis: Any) -> str:
    """Return the name of the process group along an axis, by which operators know it."""
    return mesh.get_group(axis).group_name


PATCHES: tuple[Patch, ...] = (
    Patch(
        "the collectives of torch.distributed.ProcessGroup and of its backends, and "
        "torch.distributed._broadcast_coalesced",
        "They would send or overwrite this rank's shard of a DTensor as if it were the tensor. Not "
        "by __torch_function__, which torch.distributed calls for some arguments of some functions "
        "and C++ for none.",
        _guard_process_groups,
    ),
    Patch(
        "torch.distributed._functional_collectives._resolve_group and _expand_group",
        "Functional collectives take a mesh, or a mesh and an axis, as the group: ours too.",
        _take_our_meshes,
    ),
)
"""The changes to the functions of torch.distributed."""
