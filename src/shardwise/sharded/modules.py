"""Modules with sharded tensors: their parameters, their outputs, their state dicts.

Everything here is called by all ranks, with the same arguments. What does not fit is refused on all
of them, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.sharded.agreeing import check_agreement, objections
from shardwise.sharded.errors import ShardedTensorError
from shardwise.sharded.group import Group, GroupLike, as_group
from shardwise.sharded.plan import (
    Place,
    Resolved,
    Sharder,
    ShardingPlan,
    check_shardable,
    near,
    resolved,
    tensors_of,
)
from shardwise.sharded.specs import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    as_spec,
    summary,
)
from shardwise.sharded.tensor import ShardedTensor

# ---- parameters


def shard_tensor(
    tensor: torch.Tensor,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: GroupLike = None,
) -> ShardedTensor:
    """A tensor that one rank has whole, as a sharded tensor.

    Arguments:
        tensor: on ranks other than the source, only its shape and dtype count.
        sharding_spec: how to cut it.
        src_rank: whose data it becomes, by its index in the process group.
        process_group: the ranks that take part; all by default.
    """
    spec = as_spec(sharding_spec, "sharding_spec")
    return spec.shard(tensor, src_rank=src_rank, process_group=process_group)


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: GroupLike = None,
) -> None:
    """Make a parameter of a module a sharded tensor, in place. So can a buffer or another tensor be
    that is an attribute. Where it is tied to others in the module, they stay one.

    Arguments:
        module: whose parameter it is.
        param_name: its name there.
        sharding_spec: how to cut it.
        src_rank: whose data it becomes, by its index in the process group.
        process_group: the ranks that take part; all by default.
    """
    group = as_group(process_group)
    with objections(group):
        spec = as_spec(sharding_spec, "sharding_spec")
        own = {name: value for name, (owner, _), value in tensors_of(module) if owner is module}
        if param_name not in own:
            raise ShardedTensorError(
                f"param_name: expected a tensor of {type(module).__name__}, got {param_name!r}"
                f"{near(param_name, own)}"
            )
        tensor = own[param_name]
        check_shardable(tensor, spec, group, f"param_name: {param_name!r}")
    places = [place for _, place, value in tensors_of(module) if value is tensor]
    _shard_in_place(places, tensor, spec, src_rank, group)


def _shard_in_place(
    places: Sequence[Place], tensor: torch.Tensor, spec: ShardingSpec, src_rank: int, group: Group
) -> None:
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

    The whole plan is checked on all ranks before anything is changed. Parameters that are tied
    stay so; a submodule that is used in several places is replaced in all of them.

    Arguments:
        module: the module.
        plan: the parameters to cut, the submodules that Sharders replace, and what becomes of
            outputs.
        src_rank: whose parameters are the ones, by its index in the process group.
        process_group: the ranks that take part; all by default.
    """
    group = as_group(process_group)
    with objections(group):
        todo = resolved(module, plan, group)
    check_agreement(group, group.communicator.gather_objects(_facts(todo)))
    with objections(group):
        made = {
            name: _sharded_by(name, sharder, old)
            for name, (_, old, sharder) in todo.sharders.items()
        }
    for places, tensor, spec in todo.parameters.values():
        _shard_in_place(places, tensor, spec, src_rank, group)
    for name, (swaps, _, _) in todo.sharders.items():
        for owner, child in swaps:
            setattr(owner, child, made[name])
    for name, spec in todo.output_plan.items():
        reshard_output(module.get_submodule(name), spec)
    for name in todo.return_local_tensor:
        collect_local_shard(module.get_submodule(name))


def _sharded_by(name: str, sharder: Sharder, submodule: nn.Module) -> nn.Module:
    made = sharder.shard(submodule)
    if not isinstance(made, nn.Module):
        raise ShardedTensorError(
            f"plan[{name!r}]: expected a module from {type(sharder).__name__}.shard, got {made!r}"
        )
    return made


def _facts(todo: Resolved) -> dict[str, Any]:
    """What must be the same on all ranks."""
    facts: dict[str, Any] = {
        "plan": sorted([*todo.parameters, *todo.sharders]),
        "output_plan": {name: _known(spec) for name, spec in todo.output_plan.items()},
        "return_local_tensor": todo.return_local_tensor,
    }
    for name, (_, tensor, spec) in todo.parameters.items():
        facts[f"plan[{name!r}]"] = _known(spec)
        facts[f"{name}.shape"] = tuple(tensor.shape)
        facts[f"{name}.dtype"] = str(tensor.dtype)
        facts[f"{name}.requires_grad"] = tensor.requires_grad
    for name, (_, _, sharder) in todo.sharders.items():
        facts[f"plan[{name!r}]"] = type(sharder).__qualname__
    return facts


def _known(spec: ShardingSpec) -> ShardingSpec | str:
    """A spec that can be compared; of a user's own, which may not say when two are equal, its
    kind. Of parameters the shards are compared, too, when they are cut."""
    is_known = type(spec) in (ChunkShardingSpec, EnumerableShardingSpec)
    return spec if is_known else type(spec).__qualname__


# ---- outputs


def reshard_output(module: nn.Module, resharding_spec: ShardingSpec) -> nn.Module:
    """Let the output of a module, if it is a ShardedTensor, be cut otherwise; returns the module.

    Gradients move back. What the module returns is left as it is: it may be one of its parameters.
    """
    spec = as_spec(resharding_spec, "resharding_spec")

    def reshard(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, ShardedTensor):
            return output
        # Of a leaf a copy is moved, so that the gradient finds the way back to it.
        return (output.clone() if output.requires_grad else output.detach()).reshard(spec)

    module.register_forward_hook(reshard)
    return module


def collect_local_shard(module: nn.Module) -> nn.Module:
    """Let the output of a module, if it is a ShardedTensor, be the tensor that each rank holds of
    it; returns the module.

    If it is cut into chunks along a dim, and all chunks have length 1, the dim is left out: of a
    tensor of size [4, 16] on 4 ranks each gets one of size [16]. If only some have length 1, the
    dim stays on all ranks, unlike in torch: the number of dims is the same everywhere.
    """

    def collect(module: nn.Module, args: Any, output: Any) -> Any:
        return _collected(output) if isinstance(output, ShardedTensor) else output

    module.register_forward_hook(collect)
    return module


def _collected(output: ShardedTensor) -> torch.Tensor:
    for rank in output._group.ranks:
        count = len(output._held.by(rank))
        if count != 1:
            raise ShardedTensorError(
                f"collect_local_shard: expected one shard on each rank, rank {rank} has {count} "
                f"of {summary(output._sharding_spec)}; reshard_output(module, spec) first"
            )
    local, spec = output.local_tensor(), output._sharding_spec
    if not isinstance(spec, ChunkShardingSpec):
        return local
    dim = spec.dim % output.dim()
    lengths = {box.shape[dim] for box in output._held.boxes}
    return local.squeeze(dim) if lengths == {1} else local


# ---- state dicts


def state_dict_hook(
    module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Put sharded tensors that are attributes, neither parameters nor buffers, into a state dict.

    To be registered with `module._register_state_dict_hook`. Parameters and buffers need no hook.
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

    To be registered with `module._register_load_state_dict_pre_hook(hook, True)`. What it takes is
    left out of the state dict afterwards: unlike with torch's, loading may be strict.
    """
    for path, owner in module.named_modules(remove_duplicate=False):
        for attribute in list(vars(owner)):
            key = f"{prefix}{path}.{attribute}" if path else f"{prefix}{attribute}"
            if isinstance(state_dict.get(key), ShardedTensor):
                setattr(owner, attribute, state_dict.pop(key))
