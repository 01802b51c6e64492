"""The arguments of `fully_shard` and `replicate`: what they accept, and in which form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.api.wrappers import check_unwrapped
from shardwise.core.checks import as_int
from shardwise.core.errors import LayoutError, also
from shardwise.core.layout_input import as_dim
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement, Replicate, Shard, as_placement
from shardwise.fsdp.errors import FSDPError, StateError
from shardwise.fsdp.mesh_info import (
    DataParallelMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
)
from shardwise.fsdp.module import FSDPModule

PlacementFunction = Callable[[nn.Parameter], Placement | ShardPlacementResult | None]

ShardingFunction = Callable[[nn.Parameter, str], tuple[int | None, DataParallelMeshInfo]]
"""Maps a parameter and its name to the dim to shard, if any, and the ranks to shard it over."""


def checked_modules(module: Any, function: str) -> list[nn.Module]:
    """Return the argument `module` as a list of modules that can be made data-parallel."""
    modules = list(module) if isinstance(module, list | tuple) else [module]
    if not modules:
        raise FSDPError(f"{function}(module): expected a module or several, got an empty list")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise also(FSDPError, TypeError)(
                f"{function}(module): expected a module or a list of modules, got "
                f"{type(each).__name__}"
            )
        has_forward = type(each).forward is not nn.Module.forward or "forward" in vars(each)
        if isinstance(each, nn.ModuleList | nn.ModuleDict) and not has_forward:
            raise FSDPError(
                f"{function}(module): expected a module that is called, got a "
                f"{type(each).__name__}, which has no forward; pass the modules in it, each in a "
                "call or all as one list"
            )
        if isinstance(each, FSDPModule):
            raise also(FSDPError, RuntimeError, AssertionError)(
                f"{function}(module): expected a module that is not data-parallel yet, got "
                f"{type(each).__name__}; call it once for each module"
            )
        if sum(each is other for other in modules) > 1:
            raise FSDPError(
                f"{function}(module): expected a list of different modules, got the same "
                f"{type(each).__name__} twice"
            )
        check_unwrapped(function, each)
    return modules


_DDP_OPTIONS: dict[str, tuple[Any, ...]] = {
    "find_unused_parameters": (False, True),
    "gradient_as_bucket_view": (False, True),
    "static_graph": (False, True),
    "broadcast_buffers": (False, True),
    "skip_all_reduce_unused_params": (False, True),
    "check_reduction": (False, True),
    "init_sync": (True,),
    "dim": (0,),
    "output_device": (None,),
    "device_ids": (None,),
    "delay_all_reduce_named_params": (None,),
    "param_to_hook_all_reduce": (None,),
    "mixed_precision": (None,),
}
"""The other arguments of `DistributedDataParallel`, and their values that `replicate` accepts."""


def check_ddp_options(options: dict[str, Any]) -> None:
    """Check arguments of `DistributedDataParallel` that `replicate` got."""
    for name, value in options.items():
        if name not in _DDP_OPTIONS:
            raise also(FSDPError, TypeError)(
                f"replicate: expected no argument {name!r}; it takes {', '.join(_DDP_OPTIONS)}"
            )
        accepted = _DDP_OPTIONS[name]
        if not any(value is each or (each == 0 and value == 0) for each in accepted):
            remedy = "; use mp_policy=MixedPrecisionPolicy(...)" if "precision" in name else ""
            raise FSDPError(
                f"{name}: expected {' or '.join(map(repr, accepted))}, got {value!r}{remedy}"
            )


def only_mesh(mesh: Any, device_mesh: Any, process_group: Any, modules: Sequence[nn.Module]) -> Any:
    """Return the mesh that is given by one of three arguments, if any."""
    names = ("mesh", "device_mesh", "process_group")
    given = [
        name
        for name, value in zip(names, (mesh, device_mesh, process_group), strict=True)
        if value is not None
    ]
    if len(given) > 1:
        raise FSDPError(f"replicate: expected one of {' and '.join(given)}, got both")
    if process_group is not None:
        return DeviceMesh.from_group(process_group, device_type_of(modules), mesh_dim_names=("dp",))
    return device_mesh if mesh is None else mesh


def bucket_bytes(megabytes: Any) -> int | None:
    """Return the argument `bucket_cap_mb` in bytes."""
    if megabytes is None:
        return None
    is_number = isinstance(megabytes, int | float) and not isinstance(megabytes, bool)
    if not is_number or not 0 < megabytes < math.inf:
        raise FSDPError(f"bucket_cap_mb: expected a number above 0, got {megabytes!r}")
    return max(1, int(megabytes * (1 << 20)))


def check_device_id(device_id: Any, info: DataParallelMeshInfo) -> None:
    """Check the argument `device_id`."""
    if device_id is None:
        return
    if not isinstance(device_id, int | torch.device) or isinstance(device_id, bool):
        raise StateError(
            f"device_id: expected an int or a torch.device, got {type(device_id).__name__}"
        )
    if isinstance(device_id, torch.device) and device_id.type != info.mesh.device_type:
        raise FSDPError(
            f"device_id: expected a {info.mesh.device_type} device, as the mesh is of, got "
            f"{device_id}"
        )


def checked_reshard(value: Any, size: int) -> bool | int | None:
    """Return the argument `reshard_after_forward`; `size` is that of the shard axis."""
    if value is None or isinstance(value, bool):
        return value
    count = as_int(value)
    if count is None or count < 1 or size % count:
        raise FSDPError(
            f"reshard_after_forward: expected True, False, None or a number of ranks that divides "
            f"{size}, the size of the shard axis; got {value!r}"
        )
    if count == 1:
        return False
    return True if count == size else count


def sharding_fn(
    function: PlacementFunction | None, info: DataParallelMeshInfo, reshard: bool | int | None
) -> ShardingFunction:
    """Return a function that maps a parameter and its name to the dim to shard, if any, and the
    ranks to shard it over."""
    if function is not None and not callable(function):
        raise FSDPError(
            f"shard_placement_fn: expected a function of a parameter, got {function!r}; for one "
            f"placement of all pass lambda parameter: {function!r}"
        )

    def sharding_of(parameter: nn.Parameter, name: str) -> tuple[int | None, DataParallelMeshInfo]:
        wanted: Any = None if function is None else function(parameter)
        where = f"shard_placement_fn: {name}"
        own = info
        if isinstance(wanted, ShardPlacementResult):
            wanted, own = wanted.placement, _checked_info(wanted.mesh_info, reshard, where)
        return _checked_dim(wanted, parameter, where), own

    return sharding_of


def _checked_dim(wanted: Any, parameter: nn.Parameter, where: str) -> int | None:
    if wanted is None:
        return 0 if parameter.dim() else None
    placement = as_placement(wanted, where)
    if isinstance(placement, Replicate):
        return None
    if not isinstance(placement, Shard) or placement != Shard(placement.dim):
        raise FSDPError(
            f"{where}: expected Shard(dim), Replicate() or None, alone or in a "
            f"ShardPlacementResult, got {wanted!r}"
        )
    try:
        return as_dim(placement.dim, parameter.dim(), where)
    except LayoutError as error:
        raise also(FSDPError, AssertionError)(error.args[0]) from None


def _checked_info(info: Any, reshard: bool | int | None, where: str) -> DataParallelMeshInfo:
    """Check the ranks that a parameter of its own choice is sharded over."""
    if not isinstance(info, FSDPMeshInfo):
        raise FSDPError(
            f"{where}: ShardPlacementResult(mesh_info): expected an FSDPMeshInfo or HSDPMeshInfo, "
            f"got {info!r}"
        )
    if info.mesh.ndim != (2 if isinstance(info, HSDPMeshInfo) else 1):
        raise FSDPError(
            f"{where}: ShardPlacementResult(mesh_info): expected a mesh of the data-parallel axes "
            f"only, got {info.mesh!r}"
        )
    if not info.mesh.is_abstract and info.mesh.get_coordinate() is None:
        raise FSDPError(
            f"{where}: ShardPlacementResult(mesh_info): expected a mesh that rank "
            f"{info.mesh.get_rank()} is in, got {info.mesh!r}"
        )
    if reshard not in (None, True, False) and info.shard_mesh_size % reshard:
        raise FSDPError(
            f"reshard_after_forward: {where} has a shard axis of {info.shard_mesh_size} ranks, "
            f"which {reshard} does not divide; pass True or False"
        )
    return info


def device_type_of(modules: Sequence[nn.Module]) -> str:
    """Return the device type of the default mesh: that of the parameters, unless all are meta."""
    for module in modules:
        for parameter in module.parameters():
            if not parameter.is_meta:
                return parameter.device.type
    return "cuda" if torch.cuda.is_available() else "cpu"


def checked_ignored(ignored: Any) -> list[nn.Parameter]:
    """Return the argument `ignored_params` as a list."""
    if ignored is None:
        return []
    found = list(ignored) if isinstance(ignored, Iterable) else [ignored]
    for each in found:
        if not isinstance(each, nn.Parameter):
            raise FSDPError(
                f"ignored_params: expected a set of parameters, got {type(each).__name__}"
                + ("; names are not enough" if isinstance(each, str) else "")
            )
    return found
