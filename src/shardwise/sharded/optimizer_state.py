"""The state of an optimizer of shards as a state dict of whole parameters, and back.

Ranks gather the facts about each other's shards once per process group. All decisions follow from
these facts, so they are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim

from shardwise.core.errors import ShardedStateError, ShardedTensorError
from shardwise.sharded.group import RankGroup, ShardOwnership, raise_on_all_ranks
from shardwise.sharded.tensor import ShardedTensor


@dataclass(frozen=True)
class NamedParameters:
    """The parameters of an optimizer of shards, and their names."""

    named: Mapping[str, torch.Tensor]
    groups: Sequence[Sequence[str]]
    """The names of the parameters of each parameter group."""
    optimizer: optim.Optimizer
    """The optimizer of this rank's shards and of the plain parameters."""

    def process_groups(self) -> list[RankGroup]:
        """Return the process groups of the sharded parameters, each once."""
        sharded = (each for each in self.named.values() if isinstance(each, ShardedTensor))
        return list({each._group.ranks: each._group for each in sharded}.values())

    def numbers(self) -> dict[str, list[int]]:
        """Return the numbers that the optimizer's state dict gives to the local tensors of each
        parameter."""
        found: dict[str, list[int]] = {}
        at = 0
        for names, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            end = at + len(group["params"])
            for name in names:
                count = len(_local_tensors(self.named[name]))
                found[name] = list(range(at, at + count))
                at += count
            at = end  # a group without local tensors has one dummy tensor
        return found


def _local_tensors(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of a parameter that the optimizer of this rank updates."""
    return parameter._local_tensors() if isinstance(parameter, ShardedTensor) else [parameter]


# ---- saving


def gather_state(parameters: NamedParameters) -> dict[str, Any]:
    """Return the state of all parameters by name, and the parameter groups."""
    state: dict[str, Any] = {}
    facts = _gather_facts(parameters)
    for name, parameter in parameters.named.items():
        if isinstance(parameter, ShardedTensor):
            merged = _merge_state(name, parameter, facts[name], parameters.optimizer)
        else:
            merged = dict(parameters.optimizer.state.get(parameter, {}))
        if merged:
            state[name] = merged
    groups = [
        {**{key: each for key, each in group.items() if key != "params"}, "params": list(names)}
        for names, group in zip(parameters.groups, parameters.optimizer.param_groups, strict=True)
    ]
    return {"state": state, "param_groups": groups}


Facts = dict[str, Any]
"""The state of one shard: by key the dtype of a tensor of the shard's shape, or else the value."""

ShardFacts = tuple[int, int, Facts]
"""The rank of a shard, its position there, and the facts about its state."""


def _gather_facts(parameters: NamedParameters) -> dict[str, list[ShardFacts]]:
    """Return the facts about all shards of each sharded parameter. Shards without elements are left
    out, as their state does not matter."""
    found: dict[str, list[ShardFacts]] = {}
    for group in parameters.process_groups():
        own = {
            name: [
                (at, _facts(each, parameters.optimizer))
                for at, each in enumerate(parameter._local_tensors())
                if each.numel() > 0
            ]
            for name, parameter in parameters.named.items()
            if isinstance(parameter, ShardedTensor) and parameter._group.ranks == group.ranks
        }
        for rank, theirs in zip(group.ranks, group.communicator.gather_objects(own), strict=True):
            for name, shards in theirs.items():
                found.setdefault(name, []).extend((rank, *each) for each in shards)
    return found


def _facts(piece: torch.Tensor, optimizer: optim.Optimizer) -> Facts:
    return {
        key: value.dtype if _has_shape_of(key, value, piece) else _as_counter(value)
        for key, value in optimizer.state.get(piece, {}).items()
    }


def _has_shape_of(key: str, value: Any, piece: torch.Tensor) -> bool:
    """Return whether state has an element for each element of a shard. A counter is told by its
    key, as a shard may have 0 dims too."""
    return isinstance(value, torch.Tensor) and value.shape == piece.shape and key != "step"


def _as_counter(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _merge_state(
    name: str, parameter: ShardedTensor, shards: list[ShardFacts], optimizer: optim.Optimizer
) -> dict[str, Any]:
    """Return the state of a parameter's shards as the state of one parameter; refuse
    contradictions."""
    if not shards:
        return {}
    rank, at, first = shards[0]
    for other, number, facts in shards:
        problem = _difference(first, facts)
        if problem is not None:
            raise ShardedStateError(
                f"state_dict: the state of {name!r} is not that of one parameter: {problem} of "
                f"shard {at} of rank {rank} and shard {number} of rank {other} differ; its shards "
                "must have been stepped together"
            )
    merged: dict[str, Any] = {}
    for key, value in first.items():
        if not isinstance(value, torch.dtype):
            merged[key] = value
            continue
        pieces = parameter._local_tensors()
        states = [optimizer.state.get(piece, {}).get(key) for piece in pieces]
        tensors = [  # a shard without elements may have no state
            torch.empty_like(piece.detach(), dtype=value) if state is None else state.detach()
            for state, piece in zip(states, pieces, strict=True)
        ]
        merged[key] = parameter._with_tensors(
            tensors, dtype=value, requires_grad=False, pin_memory=False
        )
    return merged


def _difference(first: Facts, other: Facts) -> str | None:
    """Describe the first difference between the facts about two shards, or return None."""
    if first.keys() != other.keys():
        return f"the names {sorted(first)} and {sorted(other)}"
    for key, value in first.items():
        its = other[key]
        if isinstance(value, torch.Tensor) and isinstance(its, torch.Tensor):
            same = torch.equal(value, its)
        else:
            same = type(value) is type(its) and value == its
        if not same:
            return f"{key!r}, {value} and {its},"
    return None


# ---- loading


def local_state_dict(parameters: NamedParameters, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict for the optimizer of this rank, made of one for whole parameters."""
    with raise_on_all_ranks(*parameters.process_groups()):
        groups = _match_groups(parameters, state_dict)
        entries = _list_entries(parameters, state_dict["state"])
    _check_same_entries(parameters, entries, state_dict["state"])
    numbers = parameters.numbers()
    state: dict[int, dict[str, Any]] = {}
    for name, key in entries:
        pieces = _cut_state(parameters.named[name], state_dict["state"][name][key])
        for number, piece in zip(numbers[name], pieces, strict=True):
            state.setdefault(number, {})[key] = piece
    inner = parameters.optimizer.state_dict()["param_groups"]
    return {
        "state": state,
        "param_groups": [
            {**given, "params": own["params"]} for given, own in zip(groups, inner, strict=True)
        ],
    }


def _match_groups(
    parameters: NamedParameters, state_dict: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the parameter groups of a state dict in the order of the optimizer's own."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise ShardedTensorError(
            "state_dict: expected what ShardedOptimizer.state_dict() gives, with 'state' and "
            f"'param_groups'; got {type(state_dict).__name__}"
        )
    given = state_dict["param_groups"]
    names = [name for group in given for name in group["params"]]
    _check_names(names, parameters.named, "param_groups", complete=True)
    found = {frozenset(group["params"]): group for group in given}
    matched = []
    for at, own in enumerate(parameters.groups):
        group = found.get(frozenset(own))
        if group is None:
            raise ShardedTensorError(
                f"state_dict: expected a group of {list(own)}, as group {at} of the optimizer is; "
                f"its groups are {[list(each['params']) for each in given]}"
            )
        matched.append(dict(group))
    return matched


def _check_names(
    names: Sequence[Any], named: Mapping[str, torch.Tensor], part: str, complete: bool
) -> None:
    """Refuse a state dict with unknown names or, if `complete`, with missing names."""
    unknown = [name for name in names if name not in named]
    missing = [name for name in named if name not in names] if complete else []
    if unknown or missing:
        raise ShardedTensorError(
            f"state_dict: the names in its {part!r} are not those of the optimizer: it lacks "
            f"{missing}, and has {unknown} besides"
        )


def _list_entries(parameters: NamedParameters, state: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the names and keys of all state to load, in the same order on all ranks; refuse state
    that does not fit."""
    _check_names(list(state), parameters.named, "state", complete=False)
    found = []
    for name in sorted(state):
        parameter = parameters.named[name]
        for key in sorted(state[name]):
            value = state[name][key]
            whole = isinstance(value, torch.Tensor) and value.dim() > 0
            if whole and tuple(value.shape) != tuple(parameter.shape):
                raise ShardedTensorError(
                    f"state_dict: {key!r} of {name!r}: expected size {tuple(parameter.shape)}, "
                    f"the parameter's; got {tuple(value.shape)}"
                )
            both = [each for each in (parameter, value) if isinstance(each, ShardedTensor)]
            if len({each._group.ranks for each in both}) > 1:
                raise ShardedTensorError(
                    f"state_dict: {key!r} of {name!r}: expected a ShardedTensor of the ranks "
                    f"{both[0]._group.ranks} of the parameter, got one of {both[1]._group.ranks}"
                )
            found.append((name, key))
    return found


def _check_same_entries(
    parameters: NamedParameters, entries: Sequence[tuple[str, str]], state: Mapping[str, Any]
) -> None:
    """Refuse state dicts that differ between ranks in their entries, or in how these are cut."""
    own = {(name, key, _ownership_of(state[name][key])) for name, key in entries}
    for group in parameters.process_groups():
        everywhere = group.communicator.gather_objects(own)
        for rank, theirs in zip(group.ranks, everywhere, strict=True):
            odd = sorted({(name, key) for name, key, _ in theirs ^ own})
            if odd:
                raise ShardedTensorError(
                    f"state_dict: expected the same on every rank, cut alike; ranks {group.rank} "
                    f"and {rank} differ in {odd}"
                )


def _ownership_of(value: Any) -> ShardOwnership | None:
    return value._ownership if isinstance(value, ShardedTensor) else None


def _cut_state(parameter: torch.Tensor, value: Any) -> list[Any]:
    """Cut the state of a parameter for each of its local tensors, and copy it."""
    if not isinstance(value, torch.Tensor):
        return [value for _ in _local_tensors(parameter)]
    if value.dim() == 0 and parameter.dim() > 0:
        return [value.clone() for _ in _local_tensors(parameter)]
    if isinstance(parameter, ShardedTensor):
        return [each.detach().clone() for each in parameter._shards_of(value)]
    whole = value.full_tensor() if isinstance(value, ShardedTensor) else value
    return [whole.detach().clone()]
