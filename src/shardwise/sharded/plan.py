"""Plans: which parameters of a module are sharded how, and which submodules by the user's code."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardwise.sharded.errors import ShardedTensorError
from shardwise.sharded.group import Group
from shardwise.sharded.metadata import TensorProperties
from shardwise.sharded.specs import ShardingSpec, as_spec, metadata_of
from shardwise.sharded.tensor import ShardedTensor
from shardwise.tensor import DTensor
from shardwise.torch_internals import own_buffers, own_modules, own_parameters


class Sharder(ABC):
    """What shards a submodule in a way of its own. Users derive from it."""

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """The module that takes the place of `module`. All ranks call it."""


@dataclass
class ShardingPlan:
    """How a module is sharded.

    Arguments:
        plan: by the name of a parameter a spec, or by the name of a submodule a Sharder.
        output_plan: by the name of a submodule ("" is the module itself), how its output is cut,
            if that is a ShardedTensor.
        return_local_tensor: names of submodules whose output, if it is a ShardedTensor, is given
            to the rest of the model as the tensor that each rank holds of it.

    Example:
        >>> ShardingPlan({"fc1.weight": rows, "fc2.weight": columns}, {"fc2": rows}, ["fc2"])
    """

    plan: dict[str, ShardingSpec | Sharder]
    output_plan: dict[str, ShardingSpec] | None = None
    return_local_tensor: list[str] | None = None


class ShardingPlanner(ABC):
    """What makes plans. Users derive from it."""

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """How this module is to be sharded."""


# ---- names in a module


Place = tuple[nn.Module, str]
"""Where a tensor or a module is: a module, and the name it has there."""


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Place, torch.Tensor]]:
    """All tensors that modules have: parameters, buffers, other attributes. A tied one comes
    once for each of its names."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for names in (own_parameters(owner), own_buffers(owner), vars(owner)):
            for name, value in names.items():
                if isinstance(value, torch.Tensor):
                    yield f"{path}.{name}" if path else name, (owner, name), value


def near(name: str, known: Iterable[str]) -> str:
    """What may have been meant by a name that there is not."""
    found = difflib.get_close_matches(name, [each for each in known if each], n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def check_shardable(tensor: torch.Tensor, spec: ShardingSpec, group: Group, argument: str) -> None:
    """Refuse a tensor that this spec cannot cut."""
    if is_lazy(tensor):
        raise ShardedTensorError(
            f"{argument}: expected a tensor that has a size, this one gets it at the first "
            "forward; run that first"
        )
    if isinstance(tensor, ShardedTensor):
        raise ShardedTensorError(
            f"{argument}: is a ShardedTensor already; to cut it otherwise, call its reshard(spec)"
        )
    if isinstance(tensor, DTensor):
        raise ShardedTensorError(
            f"{argument}: is a DTensor; make it a ShardedTensor with "
            "ShardedTensor.from_dtensor(tensor)"
        )
    try:
        metadata = metadata_of(spec, tensor.shape, TensorProperties())
        group.owners(metadata.shards_metadata)
    except ShardedTensorError as error:
        raise ShardedTensorError(f"{argument}, of size {tuple(tensor.shape)}: {error}") from None


# ---- a plan for a module


Cuts = dict[str, tuple[list[Place], torch.Tensor, ShardingSpec]]
"""By the name of a tensor (the first, if it is tied): where it is, itself, and how to cut it."""
Swaps = dict[str, tuple[list[Place], nn.Module, Sharder]]
"""By the name of a submodule: where it is, itself, and what makes the one to take its place."""


@dataclass
class Resolved:
    """A plan that fits a module. Names are sorted, so that all ranks go through them alike."""

    parameters: Cuts
    sharders: Swaps
    output_plan: dict[str, ShardingSpec]
    return_local_tensor: list[str]


def resolved(module: nn.Module, plan: ShardingPlan, group: Group) -> Resolved:
    """What a plan says of a module; refused if it does not fit."""
    if not isinstance(plan, ShardingPlan):
        raise ShardedTensorError(f"plan: expected a ShardingPlan, got {type(plan).__name__}")
    modules = dict(module.named_modules(remove_duplicate=False))
    sharders = _sharders(module, modules, plan)
    parameters = _parameters(module, modules, plan, sharders, group)
    output_plan = {}
    for name, spec in sorted((plan.output_plan or {}).items()):
        _check_module(name, modules, sharders, "output_plan")
        output_plan[name] = as_spec(spec, f"output_plan[{name!r}]")
    local = plan.return_local_tensor or []
    if isinstance(local, str):
        raise ShardedTensorError(f"return_local_tensor: expected a list of names, got {local!r}")
    for name in local:
        _check_module(name, modules, sharders, "return_local_tensor")
    return Resolved(parameters, sharders, output_plan, sorted(set(local)))


def _sharders(module: nn.Module, modules: dict[str, nn.Module], plan: ShardingPlan) -> Swaps:
    found: Swaps = {}
    for name, value in sorted(plan.plan.items()):
        if not isinstance(value, Sharder):
            continue
        if name == "":
            raise ShardedTensorError(
                "plan['']: expected the name of a submodule for a Sharder, got the module itself, "
                "which nothing can take the place of; call the Sharder's shard(module)"
            )
        if name not in modules:
            raise ShardedTensorError(
                f"plan[{name!r}]: expected the name of a submodule for a Sharder"
                f"{near(name, modules)}"
            )
        outer = _sharder_around(name, found)
        if outer is not None:
            raise ShardedTensorError(
                f"plan[{name!r}]: is inside {outer!r}, which has a Sharder of its own; "
                "leave one of them out"
            )
        target = modules[name]
        places = [
            (owner, child)
            for owner in module.modules()
            for child, value in own_modules(owner).items()
            if value is target
        ]
        found[name] = places, target, value
    return found


def _parameters(
    module: nn.Module,
    modules: dict[str, nn.Module],
    plan: ShardingPlan,
    sharders: Iterable[str],
    group: Group,
) -> Cuts:
    tensors = list(tensors_of(module))
    by_name = {name: value for name, _, value in tensors}
    found: Cuts = {}
    first_names: dict[int, str] = {}
    for name, spec in sorted(plan.plan.items()):
        argument = f"plan[{name!r}]"
        if isinstance(spec, Sharder):
            continue
        if not isinstance(spec, ShardingSpec):
            raise ShardedTensorError(
                f"{argument}: expected a ShardingSpec for a parameter, or a Sharder for a "
                f"submodule; got {spec!r}"
            )
        if name not in by_name:
            what = ", that is a submodule" if name in modules else near(name, by_name)
            raise ShardedTensorError(f"{argument}: expected the name of a parameter{what}")
        tensor = by_name[name]
        check_shardable(tensor, spec, group, argument)
        first = first_names.setdefault(id(tensor), name)
        if first != name:
            if found[first][2] != spec:
                raise ShardedTensorError(
                    f"{argument}: is tied to {first!r}, so both are one tensor; expected the same "
                    f"spec {found[first][2]}, got {spec}"
                )
            continue
        ties = {other: place for other, place, value in tensors if value is tensor}
        for other in ties:
            outer = _sharder_around(other, sharders)
            if outer is not None:
                tied = "" if other == name else f" is tied to {other!r}, which"
                raise ShardedTensorError(
                    f"{argument}:{tied} is inside {outer!r}, which has a Sharder; "
                    "leave one of them out"
                )
        found[name] = list(ties.values()), tensor, spec
    return found


def _sharder_around(name: str, sharders: Iterable[str]) -> str | None:
    """The submodule with a Sharder that a tensor or a module of this name is inside."""
    return next((each for each in sharders if name.startswith(f"{each}.")), None)


def _check_module(
    name: Any, modules: dict[str, nn.Module], sharders: Iterable[str], argument: str
) -> None:
    if name not in modules:
        raise ShardedTensorError(
            f"{argument}: expected names of submodules, got {name!r}{near(str(name), modules)}"
        )
    outer = _sharder_around(name, sharders)
    if outer is not None:
        raise ShardedTensorError(
            f"{argument}: {name!r} is inside {outer!r}, which a Sharder replaces; "
            "let the Sharder do it"
        )
