"""Activations: how tensors lie that enter and leave a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh
from shardwise.parallel.containers import (
    arguments_of,
    changed_arguments,
    changed_fields,
    changed_first_argument,
    changed_first_result,
    changed_items,
    check_fields,
)
from shardwise.parallel.crossing import Crossing, check_mesh, wrapped
from shardwise.parallel.names import PlanError
from shardwise.parallel.specs import is_spec, laid_by, placements_of, without_strange_axes
from shardwise.tensor import DTensor


@dataclass(frozen=True)
class Activations:
    """How the tensors lie that a module is called with, and that it returns.

    A spec is a placement per axis of the mesh, or such as `{"tp": Shard(1)}`: on axes that are not
    named the tensor stays as it lies. A DTensor is redistributed; a plain tensor is taken for one
    that is the same on every rank, and cut, which communicates nothing.

    Arguments:
        inputs: a spec for the first tensor among the arguments, or specs by the name or position of
            the argument: `{"x": {"tp": Replicate()}, "mask": [Replicate(), Shard(2)]}`.
        outputs: a spec for the result, or for the first tensor of several; or one spec, or None,
            for each item of a tuple; or specs by the names of the fields of a dict or dataclass.

    Example:
        >>> Activations(inputs={"tp": Replicate()}, outputs={"tp": Shard(1)})
    """

    inputs: Any = None
    outputs: Any = None

    def __post_init__(self) -> None:
        _check("inputs", self.inputs, (int, str))
        _check("outputs", self.outputs, (str,))

    def hooks(
        self, path: str, module: nn.Module, mesh: DeviceMesh, strict: bool
    ) -> Callable[[], None]:
        """What registers the hooks that do it, once everything has been checked."""
        name = path or "the module"
        enter = leave = None
        if self.inputs is not None:
            enter = _entrance(self.inputs, f"inputs of {name}", module, mesh, strict)
        if self.outputs is not None:
            leave = _exit(self.outputs, f"outputs of {name}", mesh, strict)

        def attach() -> None:
            if enter is not None:
                module.register_forward_pre_hook(enter, with_kwargs=True)
            if leave is not None:
                module.register_forward_hook(leave)

        return attach


def _check(argument: str, given: Any, keys: tuple[type, ...]) -> None:
    if given is None or is_spec(given):
        return
    if isinstance(given, Mapping):
        wrong = [
            key for key, each in given.items() if not (isinstance(key, keys) and is_spec(each))
        ]
        if given and not wrong:
            return
    elif argument == "outputs" and isinstance(given, tuple | list):
        wrong = [each for each in given if not (each is None or is_spec(each))]
        if given and not wrong:
            return
    raise PlanError(
        f"{argument}: expected placements, such as {{'tp': Shard(0)}} or one per axis, or several "
        f"of them by name or position; got {given!r}"
    )


def _step(spec: Any, what: str, mesh: DeviceMesh, strict: bool) -> Callable[[Any], Any]:
    """What brings one tensor to where a spec wants it."""
    if not strict:
        spec = without_strange_axes(spec, mesh)
    placements_of(spec, mesh, what)  # so that a wrong axis is found at once
    crossing = Crossing(what, lambda layout: laid_by(layout, spec, what))

    def step(value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, torch.Tensor):
            raise PlanError(f"{what}: expected a tensor, got {type(value).__name__}")
        if isinstance(value, DTensor):
            check_mesh(value, mesh, what)
        else:
            value = wrapped(value, Layout(mesh, value.shape), what)
        return crossing(value)

    return step


def _entrance(given: Any, what: str, module: nn.Module, mesh: DeviceMesh, strict: bool) -> Any:
    names, named, takes_any = arguments_of(module)
    if is_spec(given):
        only = _step(given, what, mesh, strict)
        return lambda module, args, kwargs: changed_first_argument(args, kwargs, named, only, what)
    steps: dict[int | str, Callable[[Any], Any]] = {}
    for key, spec in given.items():
        if isinstance(key, str) and not takes_any and key not in {*names, *named}:
            raise PlanError(
                f"{what}: expected names of its forward's arguments, "
                f"{', '.join(dict.fromkeys(names + named))}; got {key!r}"
            )
        alike = [
            steps[other] for other, before in given.items() if before == spec and other in steps
        ]
        steps[key] = alike[0] if alike else _step(spec, f"{what}[{key!r}]", mesh, strict)

    def each(module: nn.Module, args: Any, kwargs: Any) -> Any:
        changes: dict[int | str, Any] = {}
        done: dict[Any, Any] = {}  # attention of a sequence to itself is given it thrice

        def changed(step: Callable[[Any], Any], value: Any) -> Any:
            if (id(value), step) not in done:
                done[id(value), step] = step(value)
            return done[id(value), step]

        for key, step in steps.items():
            at = names.index(key) if isinstance(key, str) and key in names else key
            if isinstance(at, int) and at < len(args):
                changes[at] = changed(step, args[at])
                continue
            name = names[at] if isinstance(at, int) and at < len(names) else str(at)
            if name in kwargs:
                changes[name] = changed(step, kwargs[name])
        return changed_arguments(args, kwargs, changes)

    return each


def _exit(given: Any, what: str, mesh: DeviceMesh, strict: bool) -> Any:
    if is_spec(given):
        only = _step(given, what, mesh, strict)
        return lambda module, args, outputs: changed_first_result(outputs, only, what)
    if isinstance(given, Mapping):
        by_name = {
            name: _step(spec, f"{what}[{name!r}]", mesh, strict) for name, spec in given.items()
        }

        def fields_changed(module: nn.Module, args: Any, outputs: Any) -> Any:
            check_fields(outputs, by_name, what)
            return changed_fields(outputs, by_name)

        return fields_changed
    by_position = {
        at: _step(spec, f"{what}[{at}]", mesh, strict)
        for at, spec in enumerate(given)
        if spec is not None
    }

    def items_changed(module: nn.Module, args: Any, outputs: Any) -> Any:
        if not isinstance(outputs, tuple | list) or len(outputs) != len(given):
            found = len(outputs) if isinstance(outputs, tuple | list) else type(outputs).__name__
            raise PlanError(f"{what}: expected {len(given)} results, as the plan has, got {found}")
        return changed_items(outputs, by_position)

    return items_changed
