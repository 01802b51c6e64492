"""fully_shard and replicate: a module becomes data-parallel, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardwise.checks import as_int
from shardwise.errors import LayoutError
from shardwise.fsdp.division import Division, is_dense, sharded_layout
from shardwise.fsdp.errors import FSDPError
from shardwise.fsdp.extension import Extension, extension_of, inner_names, values_of
from shardwise.fsdp.grad_dtype import GradDtype
from shardwise.fsdp.group import Group, check_group, check_list
from shardwise.fsdp.mesh_info import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    replicate_info,
    shard_info,
)
from shardwise.fsdp.module import FSDPModule, swap_class
from shardwise.fsdp.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardwise.fsdp.settings import Settings
from shardwise.fsdp.sharing import joined
from shardwise.fsdp.slot import Slot, is_taken
from shardwise.layout_input import as_dim
from shardwise.optimizers import note_averaged, note_left_alone, note_replaced
from shardwise.placement import Placement, Replicate, Shard, as_placement
from shardwise.tensor import DTensor, unwrap, wrap
from shardwise.torch_internals import HOOK_ATTRIBUTES, own_parameters

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    from shardwise.mesh import DeviceMesh

PlacementFunction = Callable[[nn.Parameter], Placement | None]

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
    """Split the parameters of a module over data-parallel ranks, in place; each rank feeds it its
    own part of a batch, and gradients are averaged over ranks.

    Every rank of the mesh calls it. Parameters become DTensors, with the values that the first rank
    has. They are gathered for forward and backward; in between, and at rest, a rank holds its
    piece. Call it on the layers of a model first and then on the model: each call makes a group of
    what is not in one yet, and a group is gathered while the one before it computes.

    Arguments:
        module: a module, or a list of modules that make one group.
        mesh: the data-parallel ranks; all by default. With two axes parameters are the same along
            the first and split over the second (HSDP). For a module that is tensor-parallel on
            `mesh["tp"]`, pass `mesh["dp"]`.
        reshard_after_forward: whether to give back parameters after forward and to gather them
            again in backward. None: yes, but not what backward begins with, the outermost and the
            last. A number: split them over so many ranks in between, such as those of one machine.
        shard_placement_fn: called with each parameter; says how it is split: `Shard(dim)`,
            `Replicate()`, or None for `Shard(0)`. Uneven pieces are fine.
        mp_policy: dtypes of computation and of reductions.
        offload_policy: where shards are kept.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: the names of the data-parallel axes, if `mesh` has others too.

    Returns:
        The module, or list, that was given; each is now an `FSDPModule` too.

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
        Settings(reshard_after_forward=reshard),
        _placement_of(shard_placement_fn),
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
    """Keep the parameters of a module whole on every data-parallel rank, in place; each rank feeds
    it its own part of a batch, and gradients are averaged over ranks while backward goes on.

    Every rank of the mesh calls it. Parameters become replicated DTensors, with the values that the
    first rank has.

    Arguments:
        module: a module, or a list of modules. One call on the whole model is enough.
        mesh: the data-parallel ranks, along one axis; all by default.
        mp_policy: dtypes of computation and of reductions.
        offload_policy: where parameters are kept.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: the names of the data-parallel axes, if `mesh` has others too: `replicate`
            only.
    """
    modules = _checked_modules(module, "replicate")
    info = replicate_info(mesh, dp_mesh_dims, _device_type(modules))
    _make_group(
        modules,
        info,
        Settings(),
        lambda parameter, name: None,
        mp_policy,
        offload_policy,
        ignored_params,
        "Replicate",
    )
    return module


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Let modules that no common module calls, such as the stages of a pipeline, share a schedule:
    each is gathered while the one before it computes."""
    groups: dict[Group, None] = {}
    check_list(modules)
    for at, module in enumerate(modules):
        check_group(module, f"modules[{at}]")
        for each in module.modules():
            if isinstance(each, FSDPModule):
                groups[each._fsdp_group] = None
    joined(list(groups))


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
        if isinstance(each, nn.ModuleList | nn.ModuleDict):
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


def _placement_of(
    function: PlacementFunction | None,
) -> Callable[[nn.Parameter, str], int | None]:
    """Which dim of a parameter is split, if any."""
    if function is not None and not callable(function):
        raise FSDPError(
            f"shard_placement_fn: expected a function of a parameter, got {function!r}; for one "
            f"placement of all pass lambda parameter: {function!r}"
        )

    def dim_of(parameter: nn.Parameter, name: str) -> int | None:
        wanted: Any = None if function is None else function(parameter)
        if wanted is None:
            return 0 if parameter.dim() else None
        where = f"shard_placement_fn: {name}"
        placement = as_placement(wanted, where)
        if isinstance(placement, Replicate):
            return None
        if not isinstance(placement, Shard) or placement != Shard(placement.dim):
            raise FSDPError(f"{where}: expected Shard(dim), Replicate() or None, got {wanted!r}")
        try:
            return as_dim(placement.dim, parameter.dim(), where)
        except LayoutError as error:
            raise FSDPError(error.args[0]) from None

    return dim_of


def _device_type(modules: Sequence[nn.Module]) -> str:
    """Where a default mesh computes: where the modules are, unless that is nowhere yet."""
    for module in modules:
        for parameter in module.parameters():
            if not parameter.is_meta:
                return parameter.device.type
    return "cuda" if torch.cuda.is_available() else "cpu"


# ---- making a group


def _make_group(
    modules: list[nn.Module],
    info: DataParallelMeshInfo,
    settings: Settings,
    dim_of: Callable[[nn.Parameter, str], int | None],
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
    homes = _homes(modules, set(map(id, ignored)))
    wanted = []
    found: dict[int, tuple[Any, Extension | None, MixedPrecisionPolicy]] = {}
    for module, key, name in homes:  # all is checked before anything is changed
        parameter: Any = own_parameters(module)[key]
        if id(parameter) not in found:
            layout = _layout_of(parameter, info, dim_of, name)
            policy = mp_policy.resolved_for(parameter, name)
            found[id(parameter)] = layout, extension_of(parameter, name), policy
        wanted.append((module, key, name, parameter, *found[id(parameter)]))
    slots = []
    made: dict[int, Any] = {}
    for module, key, name, parameter, layout, extension, policy in wanted:
        if id(parameter) not in made:
            made[id(parameter)] = _sharded(parameter, layout, info, offload_policy, extension, name)
        tensor = made[id(parameter)]
        strides = getattr(tensor, "_whole_strides", None)
        slot = Slot(module, key, name, layout, strides, tensor._fsdp_extension, policy)
        slot.put(tensor)
        slot.note_grad_dtype()
        slot.take()
        slots.append(slot)
    note_left_alone(ignored)
    group = Group(modules, slots, info, mp_policy, offload_policy, settings)
    group.note_parameters()
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


def _homes(modules: Sequence[nn.Module], ignored: set[int]) -> list[tuple[nn.Module, str, str]]:
    """Where the parameters are that no group has yet, and what they are called."""
    inner = [each for module in modules for each in module.modules()]
    taken = {
        (id(slot.module), slot.key)
        for each in inner
        if isinstance(each, FSDPModule)
        for slot in each._fsdp_group.slots
    }
    homes = []
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
                if is_taken(each, key):
                    raise FSDPError(
                        f"{name}: it is in the group of a module around this one already; shard "
                        "inner modules first, and then those around them"
                    )
                homes.append((each, key, name))
    return homes


def _layout_of(
    parameter: nn.Parameter,
    info: DataParallelMeshInfo,
    dim_of: Callable[[nn.Parameter, str], int | None],
    name: str,
) -> Any:
    if is_lazy(parameter):
        raise FSDPError(
            f"{name}: it is lazy and has no shape yet; run a forward first, in one process"
        )
    twin = _sharded_twin(parameter)
    if twin is None:
        return sharded_layout(parameter, info, dim_of(parameter, name), name)
    layout, other = twin._layout, twin._fsdp_info
    if other != info:
        raise FSDPError(
            f"{name}: it is tied to a parameter of another group, on {other.mesh!r}, and this one "
            f"is on {info.mesh!r}; tied parameters need the same mesh"
        )
    return layout


def _sharded_twin(parameter: Any) -> Any:
    """What a parameter has become in another group that has it too, if any."""
    if hasattr(parameter, "_fsdp_info"):
        return parameter
    return getattr(parameter, "_fsdp_sharded", None)


def _sharded(
    parameter: Any,
    layout: Any,
    info: DataParallelMeshInfo,
    offload: OffloadPolicy,
    extension: Extension | None,
    name: str,
) -> Any:
    """The parameter as a DTensor, of which this rank holds its piece; of the first rank's data."""
    twin = _sharded_twin(parameter)
    if twin is not None:
        return twin
    whole = parameter.detach() if extension is None else values_of(parameter, name).detach()
    whole = unwrap(whole) if isinstance(whole, DTensor) else whole
    piece = _sent(whole, Division.of(layout, info), info)
    if not whole.is_meta:
        on_cpu = isinstance(offload, CPUOffloadPolicy)
        piece = piece.to("cpu" if on_cpu else info.mesh.device_type)
    result: Any = nn.Parameter(wrap(piece, layout), parameter.requires_grad)
    grad_dtype = GradDtype.set_on(parameter)
    if grad_dtype is not None:
        grad_dtype.put_on(result)
    for attribute, value in vars(parameter).items():  # what users hang on a parameter
        if attribute not in vars(result) and attribute not in inner_names(parameter):
            setattr(result, attribute, value)
    for hooks in HOOK_ATTRIBUTES:
        setattr(result, hooks, getattr(parameter, hooks))
    if not whole.is_contiguous() and is_dense(whole):
        result._whole_strides = tuple(whole.stride())
    result._fsdp_info = info
    note_averaged(result, info.mesh.size())
    result._fsdp_extension = extension
    parameter._fsdp_sharded = result
    note_replaced(parameter, name)
    return result


def _sent(whole: torch.Tensor, division: Division, info: DataParallelMeshInfo) -> torch.Tensor:
    """This rank's piece of what the first rank has."""
    like = whole.new_empty(division.shapes[division.index])
    if whole.is_meta:
        return like
    with torch.no_grad():
        if info.shard_mesh_size > 1 and info.replicate_mesh_rank == 0:
            pieces = None
            if division.index == 0:
                pieces = [division.piece(whole, index) for index in range(division.count)]
            like = info.shard_communicator("").scatter(like, pieces, 0)
        elif info.shard_mesh_size == 1:
            like = division.piece(whole, 0).clone()
        if info.replicate_mesh_size > 1:
            like = info.replicate_communicator("").broadcast(like, 0)
    return like
