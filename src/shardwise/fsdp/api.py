"""fully_shard and replicate: make a module data-parallel, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardwise.api.optimizers import note_left_alone, note_replaced
from shardwise.api.wrappers import Manager, check_unwrapped, managers
from shardwise.core.checks import as_int
from shardwise.core.errors import LayoutError
from shardwise.core.layout_input import as_dim
from shardwise.core.placement import Placement, Replicate, Shard, as_placement
from shardwise.core.tensor_state import user_attributes
from shardwise.dtensor.tensor import DTensor, unwrap, wrap
from shardwise.fsdp.config import (
    CPUOffloadPolicy,
    GroupSettings,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from shardwise.fsdp.errors import FSDPError
from shardwise.fsdp.extensions import (
    GatherExtension,
    check_can_be_split,
    extension_of,
    inner_names,
    values_of,
)
from shardwise.fsdp.mesh_info import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
    replicate_info,
    shard_info,
)
from shardwise.fsdp.module import FSDPModule, swap_class
from shardwise.fsdp.param import GradDtype, ParamSlot, Tie, is_claimed
from shardwise.fsdp.param_group import ParamGroup, check_modules, group_of
from shardwise.fsdp.param_sharding import (
    ParamSharding,
    is_dense,
    is_on_all_axes,
    sharded_layout,
)
from shardwise.fsdp.root import share_schedule
from shardwise.fsdp.shard_memory import mark_as_sharded, place_new_shards
from shardwise.torch_internals import HOOK_ATTRIBUTES, own_parameters

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    from shardwise.core.mesh import DeviceMesh

PlacementFunction = Callable[[nn.Parameter], Placement | ShardPlacementResult | None]

ShardingFunction = Callable[[nn.Parameter, str], tuple[int | None, DataParallelMeshInfo]]
"""Maps a parameter and its name to the dim to shard, if any, and the ranks to shard it over."""

_ONE_PRECISION = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | TorchMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFunction | None = None,
    mp_policy: MixedPrecisionPolicy = _ONE_PRECISION,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard the parameters of a module over data-parallel ranks, in place. Each rank runs it on its
    own part of a batch, and gradients are averaged over ranks.

    Every rank of the mesh calls it. Parameters become DTensors, with the values of the first rank.
    They are gathered for forward and backward; in between, and at rest, a rank holds its shard.
    Call it on the layers of a model first and then on the model: each call makes a group of the
    parameters that are in no group yet. A group is gathered while the group before it computes.

    Arguments:
        module: a module, or a list of modules that make one group.
        mesh: the data-parallel ranks; all by default. With two axes parameters are replicated along
            the first and sharded over the second (HSDP). For a module that is tensor-parallel on
            `mesh["tp"]`, pass `mesh["dp"]`.
        reshard_after_forward: whether to free gathered parameters after forward and to gather them
            again in backward. None: True, except for the groups that backward begins with: the
            outermost and the last. A number: shard them over that number of ranks in between, such
            as the ranks of one machine.
        shard_placement_fn: called with each parameter; returns its placement: `Shard(dim)`,
            `Replicate()`, or None for `Shard(0)`. The dim need not be divisible. To shard a
            parameter over other ranks, such as those that have the same experts, return a
            `ShardPlacementResult(placement, mesh_info)`.
        mp_policy: dtypes of computation and of reductions.
        offload_policy: where shards are kept.
        ignored_params: parameters that are not sharded.
        dp_mesh_dims: the names of the data-parallel axes, if `mesh` has others too. Parameters that
            are DTensors on all of `mesh`, whole on these axes, are sharded over them; modules then
            compute with DTensors on `mesh`.

    Returns:
        The given module or list; each module is now an `FSDPModule` too.

    Example:
        >>> for layer in model.layers:
        ...     fully_shard(layer, mesh=mesh)
        >>> fully_shard(model, mesh=mesh)
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    modules = _checked_modules(module, "fully_shard")
    info = shard_info(mesh, dp_mesh_dims, _device_type(modules))
    reshard = _checked_reshard(reshard_after_forward, info.shard_mesh_size)
    _make_group(
        modules,
        info,
        GroupSettings(reshard_after_forward=reshard),
        _sharding_fn(shard_placement_fn, info, reshard),
        mp_policy,
        offload_policy,
        ignored_params,
        "FSDP",
    )
    return module


def replicate(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | TorchMesh | None = None,
    mp_policy: MixedPrecisionPolicy = _ONE_PRECISION,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Replicate the parameters of a module on every data-parallel rank, in place. Each rank runs it
    on its own part of a batch, and gradients are averaged over ranks while backward goes on.

    Every rank of the mesh calls it. Parameters become replicated DTensors, with the values of the
    first rank.

    Arguments:
        module: a module, or a list of modules. One call on the whole model is enough.
        mesh: the data-parallel ranks, along one axis; all by default.
        mp_policy: dtypes of computation and of reductions.
        offload_policy: where parameters are kept.
        ignored_params: parameters that are not changed.
        dp_mesh_dims: the names of the data-parallel axes, if `mesh` has others too; only
            `DataParallelMeshDims(replicate=...)`.
    """
    modules = _checked_modules(module, "replicate")
    info = replicate_info(mesh, dp_mesh_dims, _device_type(modules))
    _make_group(
        modules,
        info,
        GroupSettings(),
        lambda parameter, name: (None, info),
        mp_policy,
        offload_policy,
        ignored_params,
        "Replicate",
    )
    return module


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Let modules without a common outer module share a schedule, such as the stages of a pipeline.

    Each module is then gathered while the one before it computes.
    """
    groups: dict[ParamGroup, None] = {}
    check_modules(modules)
    for index, module in enumerate(modules):
        group_of(module, f"modules[{index}]")
        for each in module.modules():
            if isinstance(each, FSDPModule):
                groups[each._fsdp_group] = None
    share_schedule(list(groups))


# ---- checks


def _checked_modules(module: Any, function: str) -> list[nn.Module]:
    modules = list(module) if isinstance(module, list | tuple) else [module]
    if not modules:
        raise FSDPError(f"{function}(module): expected a module or several, got an empty list")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise FSDPError(
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
            raise FSDPError(
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


def _checked_reshard(value: Any, size: int) -> bool | int | None:
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


def _sharding_fn(
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
        raise FSDPError(error.args[0]) from None


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


def _device_type(modules: Sequence[nn.Module]) -> str:
    """Return the device type of the default mesh: that of the parameters, unless all are meta."""
    for module in modules:
        for parameter in module.parameters():
            if not parameter.is_meta:
                return parameter.device.type
    return "cuda" if torch.cuda.is_available() else "cpu"


# ---- making a group


def _make_group(
    modules: list[nn.Module],
    info: DataParallelMeshInfo,
    settings: GroupSettings,
    sharding_of: ShardingFunction,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    ignored_params: Iterable[nn.Parameter] | None,
    prefix: str,
) -> None:
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise FSDPError(f"mp_policy: expected a MixedPrecisionPolicy, got {mp_policy!r}")
    if not isinstance(offload_policy, OffloadPolicy):
        raise FSDPError(f"offload_policy: expected an OffloadPolicy, got {offload_policy!r}")
    ignored = _checked_ignored(ignored_params)
    choices = []
    known: dict[int, tuple[Any, ...]] = {}
    # All parameters are checked before any is changed.
    for module, key, name in _find_params(modules, set(map(id, ignored))):
        parameter: Any = own_parameters(module)[key]
        if id(parameter) not in known:
            layout, own = _layout_of(parameter, info, sharding_of, name)
            policy = mp_policy.resolved_for(parameter, name)
            known[id(parameter)] = layout, own, extension_of(parameter, name), policy
        choices.append((module, key, name, parameter, *known[id(parameter)]))
    slots = []
    made: dict[int, Any] = {}
    new = []
    for module, key, name, parameter, layout, own, extension, policy in choices:
        tensor = made.get(id(parameter))
        if tensor is None:
            tensor = _sharded_form(parameter)
        if tensor is None:
            tensor = _shard_param(parameter, layout, own, offload_policy, extension, name)
            new.append(tensor)
        made[id(parameter)] = tensor
        strides = getattr(tensor, "_gathered_strides", None)
        tie = getattr(tensor, "_fsdp_tie", None) or Tie()
        extension = getattr(tensor, "_fsdp_extension", extension)
        slot = ParamSlot(module, key, name, layout, strides, extension, policy, own, tie, tensor)
        mark_as_sharded(tensor, slot)
        slot.put(tensor)
        slot.note_grad_dtype()
        slot.claim()
        slots.append(slot)
    note_left_alone(ignored)
    group = ParamGroup(modules, slots, info, mp_policy, offload_policy, settings)
    place_new_shards(group, new)
    for module in modules:
        swap_class(module, group, prefix)


def _checked_ignored(ignored: Any) -> list[nn.Parameter]:
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


def _find_params(
    modules: Sequence[nn.Module], ignored: set[int]
) -> list[tuple[nn.Module, str, str]]:
    """Return the module, key and name of each parameter that is in no group yet."""
    inner = [each for module in modules for each in module.modules()]
    taken = {
        (id(slot.module), slot.key)
        for each in inner
        if isinstance(each, FSDPModule)
        for slot in each._fsdp_group.slots
    }
    found = []
    seen = set()
    for module in modules:
        for path, each in module.named_modules():
            if id(each) in seen:
                continue
            seen.add(id(each))
            for key, parameter in own_parameters(each).items():
                if parameter is None or id(parameter) in ignored or (id(each), key) in taken:
                    continue
                name = f"{path}.{key}" if path else key
                if is_claimed(each, key):
                    raise FSDPError(
                        f"{name}: it is in the group of a module around this one already; shard "
                        "inner modules first, and then those around them"
                    )
                found.append((each, key, name))
    return found


def _layout_of(
    parameter: nn.Parameter, default: DataParallelMeshInfo, sharding_of: ShardingFunction, name: str
) -> tuple[Any, DataParallelMeshInfo]:
    """Return the layout of a parameter at rest, and its data-parallel ranks."""
    if is_lazy(parameter):
        raise FSDPError(
            f"{name}: it is lazy and has no shape yet; run a forward first, in one process"
        )
    twin = _sharded_form(parameter)
    if twin is None:
        check_can_be_split(parameter, name)
        dim, info = sharding_of(parameter, name)
        if not is_on_all_axes(parameter, info):
            info = _without_other_axes(info)
        return sharded_layout(parameter, info, dim, name), info
    layout, other = twin._layout, twin._fsdp_info
    known = map(_without_other_axes, (default, sharding_of(parameter, name)[1]))
    if _without_other_axes(other) not in known:
        raise FSDPError(
            f"{name}: it is tied to a parameter of another group, on {other.mesh!r}, and this one "
            f"is on {default.mesh!r}; tied parameters need the same mesh"
        )
    return layout, other


def _without_other_axes(info: DataParallelMeshInfo) -> DataParallelMeshInfo:
    """Return the same ranks, for parameters that are not DTensors on the data-parallel axes."""
    return replace(info, dp_mesh_dims=None, spmd_mesh=None)


def _sharded_form(parameter: Any) -> Any:
    """Return the DTensor that a tied parameter has become in another group, if any."""
    if hasattr(parameter, "_fsdp_info"):
        return parameter
    return getattr(parameter, "_fsdp_sharded", None)


def _shard_param(
    parameter: Any,
    layout: Any,
    info: DataParallelMeshInfo,
    offload: OffloadPolicy,
    extension: GatherExtension | None,
    name: str,
) -> Any:
    """Return the sharded form of a parameter: a new parameter that is a DTensor.

    It has the values of the first data-parallel rank, and the attributes, hooks and `grad_dtype`
    that users have set on the parameter.
    """
    values = parameter.detach() if extension is None else values_of(parameter, name).detach()
    values = unwrap(values) if isinstance(values, DTensor) else values
    shard = _scatter_from_first(values, ParamSharding.of(layout, info), info)
    if not values.is_meta:
        on_cpu = isinstance(offload, CPUOffloadPolicy)
        shard = shard.to("cpu" if on_cpu else info.mesh.device_type)
    result: Any = nn.Parameter(wrap(shard, layout), parameter.requires_grad)
    grad_dtype = GradDtype.set_on(parameter)
    if grad_dtype is not None:
        grad_dtype.put_on(result)
    for attribute, value in user_attributes(parameter).items():
        if attribute not in vars(result) and attribute not in inner_names(parameter):
            setattr(result, attribute, value)
    for hooks in HOOK_ATTRIBUTES:
        setattr(result, hooks, getattr(parameter, hooks))
    if not values.is_contiguous() and is_dense(values):
        result._gathered_strides = tuple(values.stride())
    parameter._fsdp_sharded = result
    note_replaced(parameter, name)
    return result


def _scatter_from_first(
    values: torch.Tensor, sharding: ParamSharding, info: DataParallelMeshInfo
) -> torch.Tensor:
    """Return this rank's shard of the values that the first data-parallel rank has."""
    shard = values.new_empty(sharding.shapes[sharding.index])
    if values.is_meta:
        return shard
    with torch.no_grad():
        if info.shard_mesh_size > 1 and info.replicate_mesh_rank == 0:
            shards = None
            if sharding.index == 0:
                shards = [sharding.shard_of_rank(values, index) for index in range(sharding.count)]
            shard = info.shard_communicator("").scatter(shard, shards, 0)
        elif info.shard_mesh_size == 1:
            shard = sharding.shard_of_rank(values, 0).clone()
        if info.replicate_mesh_size > 1:
            shard = info.replicate_communicator("").broadcast(shard, 0)
    return shard


managers.append(
    Manager(
        lambda module: isinstance(module, FSDPModule),
        "sharded by fully_shard, or given to replicate, which gather its parameters and average "
        "its gradients themselves, over the ranks of their mesh: use the module as it is, without "
        "a wrapper. For more data-parallel ranks pass fully_shard a mesh with two axes "
        "(replicated, sharded)",
    )
)
