"""Wrappers of modules that know nothing of DTensors: right, or refused before they change anything.

`DistributedDataParallel` broadcasts parameters and averages gradients in C++, where a DTensor is
this rank's shard. Torch's own fully sharded and distributed modules would shard a shard. Where each
would be wrong, its constructor says what to do in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardwise.core.errors import DispatchError
from shardwise.dispatch.collectives import meets_only_here
from shardwise.dtensor.tensor import DTensor
from shardwise.torch_internals import (
    TORCHS_DTENSOR,
    TORCHS_FSDP1,
    TORCHS_FSDP2,
    TORCHS_PLACEMENTS,
    TORCHS_ZERO,
    device_comm,
    world_of_torch,
)
from shardwise.torch_patches.patch import Patch, Undo, replace, undo_all, when_imported


@dataclass(frozen=True, slots=True)
class Manager:
    """What reduces the gradients of a module itself, so that a wrapper must not."""

    manages: Callable[[nn.Module], bool]
    description: str
    """What it did to the module, and what to do in place of wrapping."""


managers: list[Manager] = []
"""Those of the layers above, such as `fully_shard`."""

_wrapped: WeakSet[nn.Module] = WeakSet()
"""The modules within DistributedDataParallel, which holds their parameters."""


# ---- is a module wrapped?


def check_unwrapped(name: str, module: nn.Module) -> None:
    """Refuse to shard a module whose parameters a wrapper holds: it would go on with the old ones.

    Arguments:
        name: the function that shards.
    """
    for path, each in module.named_modules():
        is_wrapper = isinstance(each, DistributedDataParallel | DataParallel)
        if is_wrapper or each in _wrapped:
            kind = type(each).__name__
            what = f"a {kind}" if is_wrapper else f"a {kind} within DistributedDataParallel"
            raise DispatchError(
                f"{name}: expected a module that is not wrapped, got {what}"
                + (f" at {path!r}" if path else "")
                + ", which holds the parameters that would be replaced. Shard the module first; "
                "DistributedDataParallel(module, process_group=mesh['dp'].get_group()) may wrap a "
                "module that is tensor-parallel on mesh['tp'], and one of fully_shard or replicate "
                "needs no wrapper"
            )


# ---- may a module be wrapped?


def _check_manager(name: str, module: nn.Module) -> None:
    for path, each in module.named_modules():
        for manager in managers:
            if manager.manages(each):
                raise DispatchError(
                    f"{name}: {f'{path!r}' if path else 'the module'} was {manager.description}"
                )


def _check_whole(name: str, module: nn.Module, ranks: Iterable[int]) -> None:
    """Refuse a module of which ranks that a wrapper keeps equal hold different shards."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for path, tensor in tensors:
        if not isinstance(tensor, DTensor) or tensor._layout.is_whole:
            continue
        if not meets_only_here(tensor._layout.mesh, ranks):
            raise DispatchError(
                f"{name}: {path!r} is a DTensor {tensor._layout!r}, of which ranks "
                f"{sorted(ranks)} hold different parts: it would overwrite them, and average their "
                "gradients. Give it the ranks that hold the same parts, "
                "process_group=mesh['dp'].get_group() beside a module sharded on mesh['tp']; or do "
                "without: shard_module on a mesh with a data axis and Activations(inputs={'dp': "
                "Shard(0)}), or fully_shard(module, mesh=mesh['dp'])"
            )


def _refuse_any(name: str, tensors: Iterable[tuple[str, Any]], remedy: str) -> None:
    for path, tensor in tensors:
        if isinstance(tensor, DTensor):
            raise DispatchError(
                f"{name}: {path or 'the tensor'} is a DTensor of shardwise, "
                f"{tensor._layout!r}: {remedy}"
            )


def _refuse_module(name: str, module: nn.Module, remedy: str) -> None:
    _check_manager(name, module)
    _refuse_any(name, [*module.named_parameters(), *module.named_buffers()], remedy)


_REMEDY_FSDP = (
    "shard it with shardwise.fsdp.fully_shard, which knows its layout: "
    "fully_shard(module, mesh=mesh['dp'])"
)
_REMEDY_DTENSOR = (
    "torch's DTensor would be made of this rank's shard; use x.redistribute(...) and shardwise's "
    "functions of the same name, or convert it: shardwise.interop.to_torch(x)"
)


def _guard(kind: Any, check: Callable[..., None]) -> Undo:
    """Check the arguments of a constructor before it runs."""
    construct = kind.__init__

    @functools.wraps(construct)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        check(*args, **kwargs)
        construct(self, *args, **kwargs)

    return replace(kind, "__init__", checked)


def _guard_data_parallel() -> Undo:
    construct = DistributedDataParallel.__init__

    @functools.wraps(construct)
    def checked(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, nn.Module):
            _check_manager("DistributedDataParallel", module)
            _check_whole("DistributedDataParallel", module, _ranks(kwargs))
        construct(self, module, *args, **kwargs)
        _wrapped.update(module.modules())

    def check(module: Any, *args: Any, **kwargs: Any) -> None:
        remedy = "it copies the tensors of one process to its devices; see docs/parallel.md"
        _refuse_module("DataParallel", module, remedy)

    return undo_all(
        [replace(DistributedDataParallel, "__init__", checked), _guard(DataParallel, check)]
    )


def _ranks(kwargs: dict[str, Any]) -> set[int]:
    """Return the ranks that a DistributedDataParallel is made for."""
    group, mesh = kwargs.get("process_group"), kwargs.get("device_mesh")
    if group is None and mesh is not None:
        group = mesh.get_group(mesh_dim=0)
    return set(world_of_torch.pg_group_ranks.get(group) or range(dist.get_world_size()))
