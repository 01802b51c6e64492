"""The state of an optimizer of shards as one of whole parameters, and back.

What must be known of shards that other ranks hold is told once per process group. Everything that
follows from it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim

from shardwise.sharded.agreeing import objections
from shardwise.sharded.errors import ShardedStateError, ShardedTensorError
from shardwise.sharded.group import Group
from shardwise.sharded.held import Held
from shardwise.sharded.tensor import ShardedTensor


@dataclass(frozen=True)
class Parameters:
    """What an optimizer of shards is for."""

    named: Mapping[str, torch.Tensor]
    groups: Sequence[Sequence[str]]
    """The names of each group's."""
    optimizer: optim.Optimizer
    """Of this rank's shards and of the plain parameters."""

    def process_groups(self) -> list[Group]:
        """The ranks that hold the sharded ones, each group of them once."""
        sharded = (each for each in self.named.values() if isinstance(each, ShardedTensor))
        return list({each._group.ranks: each._group for each in sharded}.values())

    def numbers(self) -> dict[str, list[int]]:
        """By name, the numbers that the optimizer gives to its tensors."""
        found: dict[str, list[int]] = {}
        at = 0
        for names, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            end = at + len(group["params"])
            for name in names:
                count = len(_pieces(self.named[name]))
                found[name] = list(range(at, at + count))
                at += count
            at = end  # a group without any has one that stands for nothing
        return found


def _pieces(parameter: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that the optimizer of this rank has of a parameter."""
    return parameter._tensors() if isinstance(parameter, ShardedTensor) else [parameter]


# ---- saved


def saved(parameters: Parameters) -> dict[str, Any]:
    """The state of all parameters by name, and the groups."""
    state: dict[str, Any] = {}
    told = _told(parameters)
    for name, parameter in parameters.named.items():
        if isinstance(parameter, ShardedTensor):
            merged = _merged(name, parameter, told[name], parameters.optimizer)
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
"""Of the state of one shard: by name a dtype, if it is of the shard's shape, or the value."""

Told = tuple[int, int, Facts]
"""The rank of a shard, its number there, and the facts."""


def _told(parameters: Parameters) -> dict[str, list[Told]]:
    """By sharded parameter, of each shard of all ranks that holds elements: what the
    others are like does not matter."""
    found: dict[str, list[Told]] = {}
    for group in parameters.process_groups():
        mine = {
            name: [
                (at, _facts(each, parameters.optimizer))
                for at, each in enumerate(parameter._tensors())
                if each.numel() > 0
            ]
            for name, parameter in parameters.named.items()
            if isinstance(parameter, ShardedTensor) and parameter._group.ranks == group.ranks
        }
        for rank, theirs in zip(group.ranks, group.communicator.gather_objects(mine), strict=True):
            for name, shards in theirs.items():
                found.setdefault(name, []).extend((rank, *each) for each in shards)
    return found


def _facts(piece: torch.Tensor, optimizer: optim.Optimizer) -> Facts:
    return {
        key: value.dtype if _is_alike(key, value, piece) else _counter(value)
        for key, value in optimizer.state.get(piece, {}).items()
    }


def _is_alike(key: str, value: Any, piece: torch.Tensor) -> bool:
    """Whether state has an element for each of a shard; a shard may be of 0 dims, as counters."""
    return isinstance(value, torch.Tensor) and value.shape == piece.shape and key != "step"


def _counter(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _merged(
    name: str, parameter: ShardedTensor, told: list[Told], optimizer: optim.Optimizer
) -> dict[str, Any]:
    """The state of a parameter's shards as one, where it says the same of all."""
    if not told:
        return {}
    rank, at, first = told[0]
    for other, number, facts in told:
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
        pieces = parameter._tensors()
        states = [optimizer.state.get(piece, {}).get(key) for piece in pieces]
        tensors = [  # a shard of no elements may have no state
            torch.empty_like(piece.detach(), dtype=value) if state is None else state.detach()
            for state, piece in zip(states, pieces, strict=True)
        ]
        merged[key] = parameter._with(tensors, dtype=value, requires_grad=False, pin_memory=False)
    return merged


def _difference(first: Facts, other: Facts) -> str | None:
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


# ---- loaded


def loaded(parameters: Parameters, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict for the optimizer of this rank, of one of whole parameters."""
    with objections(*parameters.process_groups()):
        groups = _matched(parameters, state_dict)
        plan = _plan(parameters, state_dict["state"])
    _check_alike(parameters, plan, state_dict["state"])
    numbers = parameters.numbers()
    state: dict[int, dict[str, Any]] = {}
    for name, key in plan:
        pieces = _cut(parameters.named[name], state_dict["state"][name][key])
        for number, piece in zip(numbers[name], pieces, strict=True):
            state.setdefault(number, {})[key] = piece
    inner = parameters.optimizer.state_dict()["param_groups"]
    return {
        "state": state,
        "param_groups": [
            {**given, "params": own["params"]} for given, own in zip(groups, inner, strict=True)
        ],
    }


def _matched(parameters: Parameters, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of a state dict in the order of the optimizer's own."""
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
    names: Sequence[Any], named: Mapping[str, torch.Tensor], what: str, complete: bool
) -> None:
    unknown = [name for name in names if name not in named]
    missing = [name for name in named if name not in names] if complete else []
    if unknown or missing:
        raise ShardedTensorError(
            f"state_dict: the names in its {what!r} are not those of the optimizer: it lacks "
            f"{missing}, and has {unknown} besides"
        )


def _plan(parameters: Parameters, state: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The parameters and names of what is to be loaded, in an order that is the same on all
    ranks; refused if something does not fit."""
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


def _check_alike(
    parameters: Parameters, plan: Sequence[tuple[str, str]], state: Mapping[str, Any]
) -> None:
    """Refuse state dicts of which some ranks have more than others, or cut otherwise."""
    mine = {(name, key, _held(state[name][key])) for name, key in plan}
    for group in parameters.process_groups():
        everywhere = group.communicator.gather_objects(mine)
        for rank, theirs in zip(group.ranks, everywhere, strict=True):
            odd = sorted({(name, key) for name, key, _ in theirs ^ mine})
            if odd:
                raise ShardedTensorError(
                    f"state_dict: expected the same on every rank, cut alike; ranks {group.rank} "
                    f"and {rank} differ in {odd}"
                )


def _held(value: Any) -> Held | None:
    return value._held if isinstance(value, ShardedTensor) else None


def _cut(parameter: torch.Tensor, value: Any) -> list[Any]:
    """What the tensors that this rank has of a parameter get of its state, each its own copy."""
    if not isinstance(value, torch.Tensor):
        return [value for _ in _pieces(parameter)]
    if value.dim() == 0 and parameter.dim() > 0:
        return [value.clone() for _ in _pieces(parameter)]
    if isinstance(parameter, ShardedTensor):
        return [each.detach().clone() for each in parameter._pieces_of(value)]
    whole = value.full_tensor() if isinstance(value, ShardedTensor) else value
    return [whole.detach().clone()]
