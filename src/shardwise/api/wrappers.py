"""Wrappers of modules, such as DistributedDataParallel: which module may be wrapped, or sharded.

A wrapper knows nothing of DTensors: it would take this rank's shard for the tensor, broadcast it to
the other ranks and average its gradients with theirs. `torch_patches.wrappers` calls these checks
where a wrapper is made, the functions that shard a module where they begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardwise.core.errors import DispatchError
from shardwise.dispatch.collectives import is_only_member
from shardwise.dtensor.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Manager:
    """What reduces the gradients of a module itself, so that a wrapper must not."""

    manages: Callable[[nn.Module], bool]
    description: str
    """What it did to the module, and what to do in place of wrapping."""


managers: list[Manager] = []
"""Those of the layers above, such as `fully_shard`."""

wrapped: WeakSet[nn.Module] = WeakSet()
"""The modules within DistributedDataParallel, which holds their parameters."""


# ---- is a module wrapped?


def check_unwrapped(name: str, module: nn.Module) -> None:
    """Refuse to shard a module whose parameters a wrapper holds: it would go on with the old ones.

    Arguments:
        name: the function that shards.
    """
    for path, each in module.named_modules():
        is_wrapper = isinstance(each, DistributedDataParallel | DataParallel)
        if is_wrapper or each in wrapped:
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

_HUGGING_FACE = ". If transformers' Trainer asked: use shardwise.hugging_face.Trainer"


def check_manager(name: str, module: nn.Module) -> None:
    """Refuse a module whose gradients are reduced by something else, such as `fully_shard`."""
    for path, each in module.named_modules():
        for manager in managers:
            if manager.manages(each):
                raise DispatchError(
                    f"{name}: {f'{path!r}' if path else 'the module'} was {manager.description}"
                    f"{_HUGGING_FACE}"
                )


def check_whole(name: str, module: nn.Module, find_ranks: Callable[[], Sequence[int]]) -> None:
    """Refuse a module of which ranks that a wrapper keeps equal hold different shards.

    Arguments:
        name: the wrapper.
        find_ranks: returns the ranks that it keeps equal; called if a tensor is split.
    """
    for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not isinstance(tensor, DTensor) or tensor._layout.is_whole:
            continue
        ranks = find_ranks()
        if not is_only_member(tensor._layout.mesh, ranks):
            raise DispatchError(
                f"{name}: {path!r} is a DTensor {tensor._layout!r}, of which ranks "
                f"{ranks} hold different parts: it would overwrite them, and average their "
                "gradients. Give it the ranks that hold the same parts, "
                "process_group=mesh['dp'].get_group() beside a module sharded on mesh['tp']; or do "
                "without: shard_module on a mesh with a data axis and Activations(inputs={'dp': "
                f"Shard(0)}}), or fully_shard(module, mesh=mesh['dp']){_HUGGING_FACE}"
            )


def refuse_dtensors(name: str, tensors: Iterable[tuple[str, Any]], remedy: str) -> None:
    """Refuse DTensors among tensors, given with their names."""
    for path, tensor in tensors:
        if isinstance(tensor, DTensor):
            raise DispatchError(
                f"{name}: {path or 'the tensor'} is a DTensor of shardwise, "
                f"{tensor._layout!r}: {remedy}"
            )


def refuse_module(name: str, module: nn.Module, remedy: str) -> None:
    """Refuse a module with DTensors."""
    check_manager(name, module)
    refuse_dtensors(name, [*module.named_parameters(), *module.named_buffers()], remedy)
