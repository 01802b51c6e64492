"""Styles that change only what a module is called with and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.mesh import DeviceMesh
from shardwise.parallel.containers import (
    arguments_of,
    changed_arguments,
    changed_fields,
    changed_items,
    check_fields,
    fields,
    is_record,
    on_tensors,
)
from shardwise.parallel.crossing import PieceLayouts, check_mesh, wrapped
from shardwise.parallel.names import PlanError
from shardwise.parallel.style import ModuleStyle, leaving
from shardwise.placement import Placement, as_placement
from shardwise.tensor import DTensor

Placements = Placement | Sequence[Placement | None] | None


class PrepareModuleInput(ModuleStyle):
    """Make DTensors of what a module is called with, and move them.

    Arguments:
        input_layouts: how plain tensors among the positional arguments lie; None for an argument
            that is left alone. They are found by name if the call gives them as keywords.
        desired_input_layouts: how they should lie; None: as they do.
        input_kwarg_layouts: the same for keywords, by name.
        desired_input_kwarg_layouts: how these should lie.
        use_local_output: whether the module is handed its pieces, rather than DTensors.
    """

    def __init__(
        self,
        *,
        input_layouts: Placements = None,
        desired_input_layouts: Placements = None,
        input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _many(input_layouts, "input_layouts")
        self.desired_input_layouts = _many(desired_input_layouts, "desired_input_layouts")
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
        if input_layouts is None and desired_input_layouts is not None:
            raise PlanError("input_layouts: expected as many as desired_input_layouts, got none")
        _check_lengths(self.input_layouts, self.desired_input_layouts, "input_layouts")
        if self.input_kwarg_layouts.keys() != self.desired_input_kwarg_layouts.keys():
            raise PlanError(
                "desired_input_kwarg_layouts: expected the names of input_kwarg_layouts, "
                f"{list(self.input_kwarg_layouts)}; got {list(self.desired_input_kwarg_layouts)}"
            )

    def hooks(self, path: str, module: nn.Module, mesh: DeviceMesh) -> None:
        names = arguments_of(module).positional
        what = self.shown(path)
        local = self.use_local_output
        by_position = {
            at: _step(f"argument {at} of {what}", mesh, given, wanted, local)
            for at, (given, wanted) in enumerate(
                zip(self.input_layouts, self.desired_input_layouts, strict=True)
            )
            if given is not None
        }
        by_name = {
            name: _step(
                f"argument {name} of {what}",
                mesh,
                as_placement(given, f"input_kwarg_layouts[{name!r}]"),
                self.desired_input_kwarg_layouts[name],
                local,
            )
            for name, given in self.input_kwarg_layouts.items()
            if given is not None
        }
        # Positional arguments may come as keywords, and the other way round.
        also_named = {names[at]: step for at, step in by_position.items() if at < len(names)}
        also_placed = {names.index(name): step for name, step in by_name.items() if name in names}
        many = len(self.input_layouts)

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if many and len(args) > many:
                raise PlanError(
                    f"{what}: expected {many} positional arguments, as input_layouts has, got "
                    f"{len(args)}; give None for those that are left alone"
                )
            changes: dict[int | str, Any] = {}
            for at, value in enumerate(args):
                step = by_position.get(at) or also_placed.get(at)
                if step is not None:
                    changes[at] = step(value)
            for name, value in kwargs.items():
                step = by_name.get(name) or also_named.get(name)
                if step is not None:
                    changes[name] = step(value)
            return changed_arguments(args, kwargs, changes)

        module.register_forward_pre_hook(enter, with_kwargs=True)

    def __repr__(self) -> str:
        return (
            f"PrepareModuleInput(input_layouts={self.input_layouts}, "
            f"desired_input_layouts={self.desired_input_layouts}, "
            f"input_kwarg_layouts={self.input_kwarg_layouts}, "
            f"desired_input_kwarg_layouts={self.desired_input_kwarg_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


class PrepareModuleOutput(ModuleStyle):
    """Make DTensors of what a module returns, and move them.

    Arguments:
        output_layouts: how plain tensors among the results lie, in their order; None for one that
            is left alone. The results may be a tensor, a tuple or list, a dict or a dataclass,
            whose fields may be given by name: `{"logits": Shard(-1)}`. What holds them is kept.
        desired_output_layouts: how they should lie.
        use_local_output: whether to return this rank's pieces, rather than DTensors.
    """

    def __init__(
        self,
        *,
        output_layouts: Placements | Mapping[str, Placement | None],
        desired_output_layouts: Placements | Mapping[str, Placement | None],
        use_local_output: bool = True,
    ) -> None:
        self.output_layouts = _many_or_named(output_layouts, "output_layouts")
        self.desired_output_layouts = _many_or_named(
            desired_output_layouts, "desired_output_layouts"
        )
        self.use_local_output = use_local_output
        given, wanted = self.output_layouts, self.desired_output_layouts
        if isinstance(given, dict) or isinstance(wanted, dict):
            if (
                not (isinstance(given, dict) and isinstance(wanted, dict))
                or given.keys() != wanted.keys()
            ):
                raise PlanError(
                    "desired_output_layouts: expected the names of output_layouts, "
                    f"{given!r}; got {wanted!r}"
                )
        else:
            _check_lengths(given, wanted, "output_layouts")

    def hooks(self, path: str, module: nn.Module, mesh: DeviceMesh) -> None:
        what = self.shown(path)
        given, wanted = self.output_layouts, self.desired_output_layouts
        keys: Any = given if isinstance(given, dict) else range(len(given))
        steps = {
            key: _step(
                f"result {key} of {what}", mesh, given[key], wanted[key], self.use_local_output
            )
            for key in keys
            if given[key] is not None
        }
        many = len(given)

        def leave(module: nn.Module, args: Any, outputs: Any) -> Any:
            if isinstance(given, dict):
                check_fields(outputs, given, what)
                return changed_fields(outputs, steps)
            if is_record(outputs):
                names = fields(outputs)
                _check_count(what, many, len(names))
                return changed_fields(outputs, {names[at]: step for at, step in steps.items()})
            if isinstance(outputs, tuple | list):
                _check_count(what, many, len(outputs))
                return changed_items(outputs, steps)
            _check_count(what, many, 1)
            return steps[0](outputs) if steps else outputs

        module.register_forward_hook(leave)

    def __repr__(self) -> str:
        return (
            f"PrepareModuleOutput(output_layouts={self.output_layouts}, "
            f"desired_output_layouts={self.desired_output_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


class PrepareModuleInputOutput(ModuleStyle):
    """`PrepareModuleInput` and `PrepareModuleOutput` in one.

    Arguments:
        use_local_input: whether the module is handed its pieces, rather than DTensors.
        use_local_output: whether it returns its pieces, rather than DTensors.
    """

    def __init__(
        self,
        *,
        input_layouts: Placements = None,
        desired_input_layouts: Placements = None,
        input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        use_local_input: bool = False,
        output_layouts: Placements | Mapping[str, Placement | None],
        desired_output_layouts: Placements | Mapping[str, Placement | None],
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def hooks(self, path: str, module: nn.Module, mesh: DeviceMesh) -> None:
        self.prepare_module_input.hooks(path, module, mesh)
        self.prepare_module_output.hooks(path, module, mesh)

    def __repr__(self) -> str:
        return (
            f"PrepareModuleInputOutput({self.prepare_module_input}, {self.prepare_module_output})"
        )


def _step(
    what: str, mesh: DeviceMesh, given: Placement, wanted: Placement | None, use_local: bool
) -> Callable[[Any], Any]:
    """What happens to one argument or result: made a DTensor, moved, made local again."""
    pieces = PieceLayouts(mesh, given)
    leave = leaving(what, wanted, use_local)

    def change(value: torch.Tensor) -> Any:
        if isinstance(value, DTensor):
            check_mesh(value, mesh, what)
            return leave(value)
        return leave(wrapped(value, pieces.layout(value), what))

    def step(value: Any) -> Any:
        if value is None:
            return None
        changed = on_tensors(value, change)
        if changed is value and not isinstance(value, torch.Tensor):
            raise PlanError(
                f"{what}: expected a tensor, got {type(value).__name__}; say None for its layout"
            )
        return changed

    return step


def _many(given: Placements, argument: str) -> tuple[Placement | None, ...]:
    if given is None:
        return ()
    many = given if isinstance(given, tuple | list) else (given,)
    return tuple(
        None if each is None else as_placement(each, f"{argument}[{at}]")
        for at, each in enumerate(many)
    )


def _many_or_named(given: Any, argument: str) -> Any:
    if isinstance(given, Mapping):
        return {
            name: None if each is None else as_placement(each, f"{argument}[{name!r}]")
            for name, each in given.items()
        }
    return _many(given, argument)


def _check_lengths(given: Sequence[Any], wanted: Sequence[Any], argument: str) -> None:
    if len(given) != len(wanted):
        raise PlanError(
            f"desired_{argument}: expected {len(given)}, as {argument} has; got {len(wanted)}"
        )


def _check_count(what: str, expected: int, found: int) -> None:
    if expected != found:
        raise PlanError(
            f"{what}: expected {expected} results, as output_layouts has, got {found}; "
            "give None for those that are left alone"
        )
