"""fully_shard and replicate: make a module data-parallel, in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardwise.api.optimizers import note_left_alone, note_replaced
from shardwise.api.wrappers import Manager, managers
from shardwise.core.mesh import DeviceMesh
from shardwise.core.tensor_state import user_attributes
from shardwise.dtensor.tensor import DTensor, unwrap, wrap
from shardwise.fsdp.arguments import (
    PlacementFunction,
    ShardingFunction,
    bucket_bytes,
    check_ddp_options,
    check_device_id,
    checked_ignored,
    checked_modules,
    checked_reshard,
    device_type_of,
    only_mesh,
    sharding_fn,
)
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
    replicate_info,
    shard_info,
)
from shardwise.fsdp.module import FSDPModule, swap_class
from shardwise.fsdp.param import GradDtype, ParamSlot, Tie, is_claimed
from shardwise.fsdp.param_group import ParamGroup, check_modules, group_of, module_state
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
    modules = checked_modules(module, "fully_shard")
    info = shard_info(mesh, dp_mesh_dims, device_type_of(modules))
    reshard = checked_reshard(reshard_after_forward, info.shard_mesh_size)
    _make_group(
        modules,
        info,
        GroupSettings(reshard_after_forward=reshard),
        sharding_fn(shard_placement_fn, info, reshard),
        mp_policy,
        offload_policy,
        ignored_params,
        "FSDP",
    )
    return module


def replicate(
    module: nn.Module | list[nn.Module],
    ignored_modules: Iterable[nn.Module] | None = None,
    *,
    mesh: DeviceMesh | TorchMesh | None = None,
    mp_policy: MixedPrecisionPolicy = _ONE_PRECISION,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    device_mesh: DeviceMesh | TorchMesh | None = None,
    process_group: Any = None,
    bucket_cap_mb: float | None = None,
    device_id: int | torch.device | None = None,
    **ddp_options: Any,
) -> Any:
    """Replicate the parameters of a module on every data-parallel rank, in place. Each rank runs it
    on its own part of a batch, and gradients are averaged over ranks while backward goes on.

    Every rank of the mesh calls it. Parameters become replicated DTensors, with the values of the
    first rank.

    It takes the arguments of both functions of that name in torch: of
    `torch.distributed._composable.replicate_with_fsdp`, and of the older
    `torch.distributed._composable.replicate`.

    Arguments:
        module: a module, or a list of modules. One call on the whole model is enough.
        ignored_modules: modules whose parameters are not changed.
        mesh: the data-parallel ranks, along one axis; all by default.
        mp_policy: dtypes of computation and of reductions.
        offload_policy: where parameters are kept.
        ignored_params: parameters that are not changed.
        dp_mesh_dims: the names of the data-parallel axes, if `mesh` has others too; only
            `DataParallelMeshDims(replicate=...)`.
        device_mesh: another name of `mesh`.
        process_group: a torch process group of the data-parallel ranks, instead of a mesh.
        bucket_cap_mb: about how many megabytes of gradients are reduced at once; 4 by default.
        device_id: the device that parameters are on; it is only checked.
        ddp_options: other arguments of `DistributedDataParallel`, which the older function takes.
            Those that only say how it works (`find_unused_parameters`, `gradient_as_bucket_view`,
            `static_graph`, `broadcast_buffers`, which means no buffers there) are accepted and not
            needed; others must have their default.
    """
    modules = checked_modules(module, "replicate")
    check_ddp_options(ddp_options)
    mesh = only_mesh(mesh, device_mesh, process_group, modules)
    info = replicate_info(mesh, dp_mesh_dims, device_type_of(modules))
    check_device_id(device_id, info)
    if ignored_modules is not None:
        inner = [each for other in ignored_modules for each in other.parameters()]
        ignored_params = [*(ignored_params or ()), *inner]
    _make_group(
        modules,
        info,
        GroupSettings(replicated_unit_bytes=bucket_bytes(bucket_cap_mb)),
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
    ignored = checked_ignored(ignored_params)
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


for _function in (fully_shard, replicate):
    setattr(_function, "state", module_state)  # noqa: B010  (as `contract` does in torch)

managers.append(
    Manager(
        lambda module: isinstance(module, FSDPModule),
        "sharded by fully_shard, or given to replicate, which gather its parameters and average "
        "its gradients themselves, over the ranks of their mesh: use the module as it is, without "
        "a wrapper. For more data-parallel ranks pass fully_shard a mesh with two axes "
        "(replicated, sharded)",
    )
)
