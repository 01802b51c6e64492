"""Every public name of torch in the packages that shardwise replaces, and how ours compares."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Parameter
from types import ModuleType
from typing import Any

import torch

from shardwise.cli.counterparts import counterpart, is_moved
from shardwise.cli.torch_names import BETTER, DIFFERENT, INSTEAD, SINCE

PACKAGES = (
    "torch.distributed.tensor",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed._composable",
    "torch.distributed._shard",
)
CLASSES = (
    "torch.distributed.tensor.DTensor",
    "torch.distributed.tensor.Placement",
    "torch.distributed.tensor.Shard",
    "torch.distributed.tensor.Replicate",
    "torch.distributed.tensor.Partial",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed.tensor._dtensor_spec.TensorMeta",
    "torch.distributed.tensor.debug.CommDebugMode",
    "torch.distributed.tensor.parallel.ParallelStyle",
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed.fsdp.FSDPModule",
    "torch.distributed.fsdp.MixedPrecisionPolicy",
    "torch.distributed.fsdp.CPUOffloadPolicy",
    "torch.distributed.fsdp.DataParallelMeshDims",
    "torch.distributed.fsdp.UnshardHandle",
    "torch.distributed._shard.sharded_tensor.ShardedTensor",
    "torch.distributed._shard.sharded_tensor.Shard",
    "torch.distributed._shard.sharded_tensor.ShardedTensorMetadata",
    "torch.distributed._shard.sharded_tensor.TensorProperties",
    "torch.distributed._shard.metadata.ShardMetadata",
    "torch.distributed._shard.sharded_optim.ShardedOptimizer",
    "torch.distributed._shard.sharding_plan.ShardingPlan",
    "torch.distributed._shard.sharding_spec.ChunkShardingSpec",
    "torch.distributed._shard.sharding_spec.EnumerableShardingSpec",
)
"""Classes whose members are compared too."""
ALIAS = "torch.distributed._shard.checkpoint"
"""Another path of torch.distributed.checkpoint, which stays torch's."""
NOT_CONSTRUCTED = {
    *("UnshardHandle", "FSDPModule", "FSDPParam", "FSDPParamGroup", "FSDPState", "DeviceMesh"),
}
"""Classes whose constructor programs do not call: functions make them. (DeviceMesh: torch lets the
mesh out for a private argument only.)"""


@dataclass(frozen=True)
class Row:
    """One name of torch, and ours."""

    name: str
    verdict: str
    """same, better, different, absent, or torch's: torch's own is used."""
    note: str
    ours: str
    """The dotted path of our name; empty if it is absent."""

    @property
    def parent(self) -> str:
        return self.name.rpartition(".")[0]


def rows() -> list[Row]:
    """Return a row for every public name of the installed torch, and of newer versions."""
    names = dict.fromkeys([*names_of_torch(), *absent_modules()])
    installed = tuple(int(each) for each in torch.__version__.split(".")[:2])
    for name, version in SINCE.items():
        if tuple(map(int, version.split("."))) > installed:
            names[name] = None
    return [row_of(name) for name in names]


def row_of(name: str) -> Row:
    reason = reason_of(INSTEAD, name)
    if reason is None:  # re-exported from a module that is absent
        defined = getattr(_object(name), "__module__", None) or ""
        reason = reason_of(INSTEAD, f"{defined}.{name.rpartition('.')[2]}")
    if reason is not None:
        return Row(name, "absent", reason, "")
    if not is_moved(name):
        return Row(name, "torch's", "stays torch's", name)
    found = counterpart(name)
    ours = "" if found is None else ".".join([found.path, *name.split(".")[found.length :]])
    for verdict, table in (("different", DIFFERENT), ("better", BETTER)):
        if (note := _note_of(table, name)) is not None:
            return Row(name, verdict, note, ours)
    return Row(name, "same", "", ours)


def _note_of(table: dict[str, str], name: str) -> str | None:
    """Return what a table says of a name, or of the same object under another name."""
    if name in table:
        return table[name]
    objects = [_object(each) for each in table]
    found = _object(name)
    at = next((at for at, each in enumerate(objects) if each is found is not None), None)
    return None if at is None or not callable(found) else list(table.values())[at]


@functools.cache
def _object(name: str) -> Any:
    try:
        return resolve(name)
    except AttributeError:
        return None


def reason_of(table: dict[str, str], name: str) -> str | None:
    """Return what a table says of a name, or of the module or class that it is in."""
    while name.count(".") > 1:
        if name in table:
            return table[name]
        name = name.rpartition(".")[0]
    return None


def names_of_torch() -> Iterator[str]:
    """Yield the public names of all modules, and the members of some classes."""
    for module in modules():
        for name in public_names(module):
            path = f"{module.__name__}.{name}"
            yield path
            if path in CLASSES:
                yield from (f"{path}.{each}" for each in members(getattr(module, name)))


def modules() -> list[ModuleType]:
    """Return the modules of the packages but for those that are absent as a whole."""
    found = []
    with warnings.catch_warnings(record=True):  # of deprecated modules
        for package in PACKAGES:
            found.append(importlib.import_module(package))
            for each in pkgutil.walk_packages(getattr(found[-1], "__path__", []), f"{package}."):
                if reason_of(INSTEAD, each.name) is None and not each.name.startswith(ALIAS):
                    found.append(importlib.import_module(each.name))
    return found


def absent_modules() -> Iterator[str]:
    """Yield the modules that are absent as a whole."""
    for name in INSTEAD:
        if isinstance(_object(name), ModuleType):
            yield name


def public_names(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and _is_of(value, module)
    )


def _is_of(value: Any, module: ModuleType) -> bool:
    """Tell whether a module defines a name, or re-exports it from its own submodules."""
    defined = getattr(value, "__module__", "") or ""
    is_package = hasattr(module, "__path__")
    return defined == module.__name__ or (is_package and defined.startswith(f"{module.__name__}."))


def members(kind: type) -> list[str]:
    own = [each for each in kind.__mro__ if each.__module__.startswith("torch.distributed")]
    found = {
        name
        for each in own
        for names in (vars(each), getattr(each, "__dataclass_fields__", ()))
        for name in names
    }
    return sorted(name for name in found if not name.startswith("_"))


def resolve(path: str) -> Any:
    """Return the object of a dotted path; raise AttributeError if there is none."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            if isinstance(found, type) and name in getattr(found, "__dataclass_fields__", {}):
                return found.__dataclass_fields__[name]
            found = getattr(found, name)
        return found
    raise AttributeError(path)


# ---- signatures

_ANY = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def difference(theirs: Any, ours: Any) -> str:
    """Return why a call that is valid for `theirs` might not be for `ours`; empty if it is."""
    if getattr(theirs, "__name__", "") in NOT_CONSTRUCTED:
        return ""
    try:
        given, wanted = inspect.signature(theirs), inspect.signature(ours)
    except (TypeError, ValueError):
        return ""  # no function, or one of C
    if all(each.kind in _ANY for each in given.parameters.values()):
        return ""  # it does not say what it takes
    return "; ".join(_differences(given, wanted))


def _differences(given: inspect.Signature, wanted: inspect.Signature) -> Iterator[str]:
    by_position = [
        each
        for each in wanted.parameters.values()
        if each.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    kinds = {each.kind for each in wanted.parameters.values()}
    taken = set()
    public = [each for name, each in given.parameters.items() if not name.startswith("_")]
    for at, each in enumerate(public):
        if each.kind in _ANY:
            if each.kind not in kinds and not by_position:
                yield f"does not take {each}"
            continue
        taken.add(each.name)
        ours = wanted.parameters.get(each.name)
        if each.kind is not Parameter.KEYWORD_ONLY and Parameter.VAR_POSITIONAL not in kinds:
            if at >= len(by_position):
                yield f"{each.name} is not taken by position"
            elif each.name not in ("self", by_position[at].name):
                yield f"position {at} is {by_position[at].name}, not {each.name}"
            else:
                taken.add(by_position[at].name)
        if each.kind is not Parameter.POSITIONAL_ONLY and each.name != "self":
            if ours is None and Parameter.VAR_KEYWORD not in kinds:
                yield f"{each.name}= is not taken"
            if ours is not None and each.default is not Parameter.empty:
                if ours.default is Parameter.empty:
                    yield f"{each.name} has no default"
                elif not _alike(each.default, ours.default):
                    yield f"{each.name} is {ours.default!r} by default, not {each.default!r}"
    for name, each in wanted.parameters.items():
        is_required = each.default is Parameter.empty and each.kind not in _ANY
        if is_required and name not in taken and name != "self":
            yield f"{name} is required"


def _alike(theirs: Any, ours: Any) -> bool:
    """Tell whether two defaults mean the same: equal, or of classes of the same name."""
    if theirs is ours or type(theirs).__name__ == type(ours).__name__ != "str":
        return type(theirs).__name__ not in ("int", "float", "bool") or theirs == ours
    return bool(theirs == ours) or type(ours).__name__ == "_HAS_DEFAULT_FACTORY_CLASS"
