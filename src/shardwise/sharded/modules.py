"""Modules with sharded tensors: their parameters, their outputs, their state dicts.

All ranks call these functions, with the same arguments. Arguments that do not fit are refused on
all ranks, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.core.errors import ShardedTensorError
from shardwise.sharded.group import (
    GroupLike,
    RankGroup,
    as_rank_group,
    check_agreement,
    raise_on_all_ranks,
)
from shardwise.sharded.plan import (
    ModuleAttribute,
    ResolvedPlan,
    Sharder,
    ShardingPlan,
    check_shardable,
    resolve_plan,
    suggest_names,
    tensors_of,
)
from shardwise.sharded.specs import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    as_spec,
    format_spec,
)
from shardwise.sharded.tensor import ShardedTensor

# ---- parameters


def shard_tensor(
    tensor: torch.Tensor,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: GroupLike = None,
) -> ShardedTensor:
    """Return a tensor that one rank has whole as a sharded tensor.

    Arguments:
        tensor: on ranks other than the source, only its shape and dtype count.
        sharding_spec: how to cut it.
        src_rank: the rank whose elements are taken, as an index in the process group.
        process_group: the ranks that take part; all by default.
    """
    spec = as_spec(sharding_spec, "sharding_spec")
    sharded: ShardedTensor = spec.shard(tensor, src_rank=src_rank, process_group=process_group)
    return sharded


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: GroupLike = None,
) -> None:
    """Replace a parameter of a module by a sharded tensor, in place; or a buffer, or another tensor
    that is an attribute. Tied parameters of the module stay tied.

    Arguments:
        module: the module that has the parameter.
        param_name: the name of the parameter in the module.
        sharding_spec: how to cut it.
        src_rank: the rank whose elements are taken, as an index in the process group.
        process_group: the ranks that take part; all by default.
    """
    group = as_rank_group(process_group)
    with raise_on_all_ranks(group):
        spec = as_spec(sharding_spec, "sharding_spec")
        own = {name: value for name, (owner, _), value in tensors_of(module) if owner is module}
        if param_name not in own:
            raise ShardedTensorError(
                f"param_name: expected a tensor of {type(module).__name__}, got {param_name!r}"
                f"{suggest_names(param_name, own)}"
            )
        tensor = own[param_name]
        check_shardable(tensor, spec, group, f"param_name: {param_name!r}")
    places = [place for _, place, value in tensors_of(module) if value is tensor]
    _shard_in_place(places, tensor, spec, src_rank, group)


def _shard_in_place(
    places: Sequence[ModuleAttribute],
    tensor: torch.Tensor,
    spec: ShardingSpec,
    src_rank: int,
    group: RankGroup,
) -> None:
    """Shard a tensor, and set the attributes that hold it to the result."""
    sharded: Any = shard_tensor(tensor, spec, src_rank, group)
    if isinstance(tensor, nn.Parameter):
        sharded = nn.Parameter(sharded, tensor.requires_grad)
    for owner, name in places:
        setattr(owner, name, sharded)


# ---- modules


def shard_module(
    module: nn.Module, plan: ShardingPlan, src_rank: int = 0, process_group: GroupLike = None
) -> None:
    """Shard a module by a plan, in place.

    The whole plan is checked on all ranks before anything is changed. Tied parameters stay tied; a
    submodule that is used in several places is replaced in all of them.

    Arguments:
        module: the module.
        plan: the parameters to cut, the submodules that Sharders replace, and what becomes of
            outputs.
        src_rank: the rank whose parameters are taken, as an index in the process group.
        process_group: the ranks that take part; all by default.
    """
    group = as_rank_group(process_group)
    with raise_on_all_ranks(group):
        resolved = resolve_plan(module, plan, group)
    check_agreement(group, group.communicator.gather_objects(_facts(resolved)))
    with raise_on_all_ranks(group):
        made = {
            name: _run_sharder(name, sharder, old)
            for name, (_, old, sharder) in resolved.sharders.items()
        }
    for places, tensor, spec in resolved.parameters.values():
        _shard_in_place(places, tensor, spec, src_rank, group)
    for name, (places, _, _) in resolved.sharders.items():
        for owner, child in places:
            setattr(owner, child, made[name])
    for name, spec in resolved.output_plan.items():
        reshard_output(module.get_submodule(name), spec)
    for name in resolved.return_local_tensor:
        collect_local_shard(module.get_submodule(name))


def _run_sharder(name: str, sharder: Sharder, submodule: nn.Module) -> nn.Module:
    made = sharder.shard(submodule)
    if not isinstance(made, nn.Module):
        raise ShardedTensorError(
            f"plan[{name!r}]: expected a module from {type(sharder).__name__}.shard, got {made!r}"
        )
    return made


def _facts(plan: ResolvedPlan) -> dict[str, Any]:
    """Return the values that must be the same on all ranks, by name."""
    facts: dict[str, Any] = {
        "plan": sorted([*plan.parameters, *plan.sharders]),
        "output_plan": {name: _comparable(spec) for name, spec in plan.output_plan.items()},
        "return_local_tensor": plan.return_local_tensor,
    }
    for name, (_, tensor, spec) in plan.parameters.items():
        facts[f"plan[{name!r}]"] = _comparable(spec)
        facts[f"{name}.shape"] = tuple(tensor.shape)
        facts[f"{name}.dtype"] = str(tensor.dtype)
        facts[f"{name}.requires_grad"] = tensor.requires_grad
    for name, (_, _, sharder) in plan.sharders.items():
        facts[f"plan[{name!r}]"] = type(sharder).__qualname__
    return facts


def _comparable(spec: ShardingSpec) -> ShardingSpec | str:
    """Return a spec that can be compared with those of other ranks. A user's own spec may not
    define equality: then it is its class name. (The shards of parameters are compared when they are
    cut.)"""
    is_known = type(spec) in (ChunkShardingSpec, EnumerableShardingSpec)
    return spec if is_known else type(spec).__qualname__


# ---- outputs


def reshard_output(module: nn.Module, resharding_spec: ShardingSpec) -> nn.Module:
    """Reshard the output of a module, if it is a ShardedTensor; returns the module.

    Backward: gradients move back. The tensor that the module returns is not changed: it may be one
    of its parameters.
    """
    spec = as_spec(resharding_spec, "resharding_spec")

    def reshard(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, ShardedTensor):
            return output
        # A copy, as reshard works in place; the gradient of a leaf moves back through the clone.
        return (output.clone() if output.requires_grad else output.detach()).reshard(spec)

    module.register_forward_hook(reshard)
    return module


def collect_local_shard(module: nn.Module) -> nn.Module:
    """Replace the output of a module, if it is a ShardedTensor, by the tensor that each rank holds
    of it; returns the module.

    If it is cut into chunks along a dim, and all chunks have length 1, the dim is left out: of a
    tensor of size [4, 16] on 4 ranks each gets one of size [16]. If only some have length 1, the
    dim stays on all ranks, unlike in torch: the number of dims is the same everywhere.
    """

    def collect(module: nn.Module, args: Any, output: Any) -> Any:
        return _local_output(output) if isinstance(output, ShardedTensor) else output

    module.register_forward_hook(collect)
    return module


def _local_output(output: ShardedTensor) -> torch.Tensor:
    """Return the local tensor of an output; refused if a rank does not have one shard."""
    for rank in output._group.ranks:
        count = len(output._ownership.boxes_of(rank))
        if count != 1:
            raise ShardedTensorError(
                f"collect_local_shard: expected one shard on each rank, rank {rank} has {count} "
                f"of {format_spec(output._sharding_spec)}; reshard_output(module, spec) first"
            )
    local, spec = output.local_tensor(), output._sharding_spec
    if not isinstance(spec, ChunkShardingSpec):
        return local
    dim = spec.dim % output.dim()
    lengths = {box.shape[dim] for box in output._ownership.boxes}
    return local.squeeze(dim) if lengths == {1} else local


# ---- state dicts


def state_dict_hook(
    module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Put sharded tensors that are attributes, neither parameters nor buffers, into a state dict.

    Register it with `module._register_state_dict_hook`. Parameters and buffers need no hook.
    """
    for name, (owner, attribute), value in tensors_of(module):
        if isinstance(value, ShardedTensor) and attribute in vars(owner):
            destination[prefix + name] = value


def pre_load_state_dict_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Set attributes, neither parameters nor buffers, to the sharded tensors of a state dict.

    Register it with `module._register_load_state_dict_pre_hook(hook, True)`. The tensors that it
    takes are removed from the state dict, so that loading may be strict, unlike with torch's hook.
    """
    for path, owner in module.named_modules(remove_duplicate=False):
        for attribute in list(vars(owner)):
            key = f"{prefix}{path}.{attribute}" if path else f"{prefix}{attribute}"
            if isinstance(state_dict.get(key), ShardedTensor):
                setattr(owner, attribute, state_dict.pop(key))
