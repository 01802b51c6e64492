"""Plans: how the parameters of a module are sharded, and which submodules the user's code
shards."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardwise.core.errors import ShardedTensorError
from shardwise.dtensor.tensor import DTensor
from shardwise.sharded.group import RankGroup
from shardwise.sharded.metadata import TensorProperties
from shardwise.sharded.specs import ShardingSpec, as_spec, build_checked_metadata
from shardwise.sharded.tensor import ShardedTensor
from shardwise.torch_internals import own_buffers, own_modules, own_parameters


class Sharder(ABC):
    """Base class of user code that shards a submodule in its own way."""

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """Return the module that replaces `module`. All ranks call it."""


@dataclass
class ShardingPlan:
    """How a module is sharded.

    Arguments:
        plan: by the name of a parameter a spec, or by the name of a submodule a Sharder.
        output_plan: by the name of a submodule ("" is the module itself), how its output is cut, if
            that is a ShardedTensor.
        return_local_tensor: names of submodules whose output, if it is a ShardedTensor, is replaced
            by the tensor that each rank holds of it.

    Example:
        >>> ShardingPlan({"fc1.weight": rows, "fc2.weight": columns}, {"fc2": rows}, ["fc2"])
    """

    plan: dict[str, ShardingSpec | Sharder]
    output_plan: dict[str, ShardingSpec] | None = None
    return_local_tensor: list[str] | None = None


class ShardingPlanner(ABC):
    """Base class of user code that makes plans."""

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """Return the plan by which this module is sharded."""


# ---- names in a module

ModuleAttribute = tuple[nn.Module, str]
"""A module, and the name under which it has a tensor or a submodule."""


def tensors_of(module: nn.Module) -> Iterator[tuple[str, ModuleAttribute, torch.Tensor]]:
    """Yield all tensors of a module and its submodules: parameters, buffers, other attributes. A
    tied tensor is yielded once for each of its names."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for names in (own_parameters(owner), own_buffers(owner), vars(owner)):
            for name, value in names.items():
                if isinstance(value, torch.Tensor):
                    yield f"{path}.{name}" if path else name, (owner, name), value


def suggest_names(name: str, known: Iterable[str]) -> str:
    """Return the part of a message that suggests known names similar to an unknown one."""
    found = difflib.get_close_matches(name, [each for each in known if each], n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def check_shardable(
    tensor: torch.Tensor, spec: ShardingSpec, group: RankGroup, argument: str
) -> None:
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
        metadata = build_checked_metadata(spec, tensor.shape, TensorProperties())
        group.owners(metadata.shards_metadata)
    except ShardedTensorError as error:
        raise ShardedTensorError(f"{argument}, of size {tuple(tensor.shape)}: {error}") from None


# ---- a plan for a module


class ParameterCut(NamedTuple):
    """A tensor to cut."""

    places: list[ModuleAttribute]
    """The attributes that hold it; several if it is tied."""
    tensor: torch.Tensor
    spec: ShardingSpec


class ModuleSwap(NamedTuple):
    """A submodule to replace."""

    places: list[ModuleAttribute]
    """The attributes that hold it."""
    module: nn.Module
    sharder: Sharder


@dataclass
class ResolvedPlan:
    """A plan that fits a module. Names are sorted, so that all ranks go through them in the same
    order. A tied parameter has the first of its names."""

    parameters: dict[str, ParameterCut]
    sharders: dict[str, ModuleSwap]
    output_plan: dict[str, ShardingSpec]
    return_local_tensor: list[str]


def resolve_plan(module: nn.Module, plan: ShardingPlan, group: RankGroup) -> ResolvedPlan:
    """Return a plan with the tensors and modules that its names stand for; refuse one that does not
    fit."""
    if not isinstance(plan, ShardingPlan):
        raise ShardedTensorError(f"plan: expected a ShardingPlan, got {type(plan).__name__}")
    modules = dict(module.named_modules(remove_duplicate=False))
    sharders = _resolve_sharders(module, modules, plan)
    parameters = _resolve_parameters(module, modules, plan, sharders, group)
    output_plan = {}
    for name, spec in sorted((plan.output_plan or {}).items()):
        _check_module(name, modules, sharders, "output_plan")
        output_plan[name] = as_spec(spec, f"output_plan[{name!r}]")
    local = plan.return_local_tensor or []
    if isinstance(local, str):
        raise ShardedTensorError(f"return_local_tensor: expected a list of names, got {local!r}")
    for name in local:
        _check_module(name, modules, sharders, "return_local_tensor")
    return ResolvedPlan(parameters, sharders, output_plan, sorted(set(local)))


def _resolve_sharders(
    module: nn.Module, modules: dict[str, nn.Module], plan: ShardingPlan
) -> dict[str, ModuleSwap]:
    """Return the submodules that the Sharders of a plan replace."""
    found: dict[str, ModuleSwap] = {}
    for name, value in sorted(plan.plan.items()):
        if not isinstance(value, Sharder):
            continue
        if name == "":
            raise ShardedTensorError(
                "plan['']: expected the name of a submodule for a Sharder, got the module itself, "
                "which cannot be replaced; call the Sharder's shard(module)"
            )
        if name not in modules:
            raise ShardedTensorError(
                f"plan[{name!r}]: expected the name of a submodule for a Sharder"
                f"{suggest_names(name, modules)}"
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
        found[name] = ModuleSwap(places, target, value)
    return found


def _resolve_parameters(
    module: nn.Module,
    modules: dict[str, nn.Module],
    plan: ShardingPlan,
    sharders: Iterable[str],
    group: RankGroup,
) -> dict[str, ParameterCut]:
    """Return the tensors that a plan cuts."""
    tensors = list(tensors_of(module))
    by_name = {name: value for name, _, value in tensors}
    found: dict[str, ParameterCut] = {}
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
            hint = ", that is a submodule" if name in modules else suggest_names(name, by_name)
            raise ShardedTensorError(f"{argument}: expected the name of a parameter{hint}")
        tensor = by_name[name]
        check_shardable(tensor, spec, group, argument)
        first = first_names.setdefault(id(tensor), name)
        if first != name:
            if found[first].spec != spec:
                raise ShardedTensorError(
                    f"{argument}: is tied to {first!r}, so both are one tensor; expected the same "
                    f"spec {found[first].spec}, got {spec}"
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
        found[name] = ParameterCut(list(ties.values()), tensor, spec)
    return found


def _sharder_around(name: str, sharders: Iterable[str]) -> str | None:
    """Return the name of the submodule with a Sharder that a tensor or module is inside, or
    None."""
    return next((each for each in sharders if name.startswith(f"{each}.")), None)


def _check_module(
    name: Any, modules: dict[str, nn.Module], sharders: Iterable[str], argument: str
) -> None:
    """Refuse a name that is no submodule, or one inside a submodule that a Sharder replaces."""
    if name not in modules:
        raise ShardedTensorError(
            f"{argument}: expected names of submodules, got {name!r}"
            f"{suggest_names(str(name), modules)}"
        )
    outer = _sharder_around(name, sharders)
    if outer is not None:
        raise ShardedTensorError(
            f"{argument}: {name!r} is inside {outer!r}, which a Sharder replaces; "
            "let the Sharder do it"
        )
