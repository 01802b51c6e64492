"""Styles that change only the inputs and outputs of a module, with torch's names and arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.core.errors import also
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement, as_placement
from shardwise.dtensor.tensor import DTensor
from shardwise.parallel.activations import ShardLayouts, check_on_mesh, wrap_shared
from shardwise.parallel.containers import (
    check_fields,
    field_names,
    forward_arguments,
    is_record,
    map_tensors,
    replace_arguments,
    replace_fields,
    replace_items,
)
from shardwise.parallel.plan_spec import PlanError
from shardwise.parallel.projections import ColwiseParallel, RowwiseParallel, SequenceParallel
from shardwise.parallel.styles import ModuleStyle, MoveOutput, make_output_move

PositionalPlacements = Placement | Sequence[Placement | None] | None


class PrepareModuleInput(ModuleStyle):
    """Make DTensors of a module's arguments, and redistribute them.

    Arguments:
        input_layouts: placements of plain tensors among the positional arguments; None for an
            argument that is left as it is. A call may give these arguments as keywords too.
        desired_input_layouts: the placements that the module needs; None: no redistribution.
        input_kwarg_layouts: as `input_layouts`, for keywords, by name.
        desired_input_kwarg_layouts: as `desired_input_layouts`, for keywords, by name.
        use_local_output: whether the module gets local shards rather than DTensors.
    """

    torch_steps = ("_prepare_input_arg", "_prepare_input_fn", "_prepare_input_kwarg_fn")

    def __init__(
        self,
        *,
        input_layouts: PositionalPlacements = None,
        desired_input_layouts: PositionalPlacements = None,
        input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _as_tuple(input_layouts, "input_layouts")
        self.desired_input_layouts = _as_tuple(desired_input_layouts, "desired_input_layouts")
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
        if input_layouts is None and desired_input_layouts is not None:
            raise also(PlanError, AssertionError)(
                "input_layouts: expected as many as desired_input_layouts, got none"
            )
        _check_lengths(self.input_layouts, self.desired_input_layouts, "input_layouts")
        if self.input_kwarg_layouts.keys() != self.desired_input_kwarg_layouts.keys():
            raise also(PlanError, AssertionError)(
                "desired_input_kwarg_layouts: expected the names of input_kwarg_layouts, "
                f"{list(self.input_kwarg_layouts)}; got {list(self.desired_input_kwarg_layouts)}"
            )

    def hooks(self, path: str, module: nn.Module, mesh: DeviceMesh) -> None:
        names = forward_arguments(module).positional
        what = self.shown(path)
        local = self.use_local_output
        by_position = {
            at: _make_mover(f"argument {at} of {what}", mesh, given, wanted, local)
            for at, (given, wanted) in enumerate(
                zip(self.input_layouts, self.desired_input_layouts, strict=True)
            )
            if given is not None
        }
        by_name = {
            name: _make_mover(
                f"argument {name} of {what}",
                mesh,
                as_placement(given, f"input_kwarg_layouts[{name!r}]"),
                self.desired_input_kwarg_layouts[name],
                local,
            )
            for name, given in self.input_kwarg_layouts.items()
            if given is not None
        }
        # A call may give positional arguments as keywords, and the other way round.
        also_named = {names[at]: move for at, move in by_position.items() if at < len(names)}
        also_placed = {names.index(name): move for name, move in by_name.items() if name in names}
        enter = _PrepareArguments(
            what, len(self.input_layouts), also_placed | by_position, also_named | by_name
        )
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
    """Make DTensors of a module's results, and redistribute them.

    Arguments:
        output_layouts: placements of plain tensors among the results, in order; None for a result
            that is left as it is. The results may be a tensor, a tuple or list, a dict or a
            dataclass, whose fields may be given by name: `{"logits": Shard(-1)}`. The type of the
            container is kept.
        desired_output_layouts: the placements that the results should have.
        use_local_output: whether to return local shards rather than DTensors.
    """

    torch_steps = ("_prepare_out_fn",)

    def __init__(
        self,
        *,
        output_layouts: PositionalPlacements | Mapping[str, Placement | None],
        desired_output_layouts: PositionalPlacements | Mapping[str, Placement | None],
        use_local_output: bool = True,
    ) -> None:
        self.output_layouts = _as_tuple_or_dict(output_layouts, "output_layouts")
        self.desired_output_layouts = _as_tuple_or_dict(
            desired_output_layouts, "desired_output_layouts"
        )
        self.use_local_output = use_local_output
        given, wanted = self.output_layouts, self.desired_output_layouts
        if isinstance(given, dict) or isinstance(wanted, dict):
            if (
                not (isinstance(given, dict) and isinstance(wanted, dict))
                or given.keys() != wanted.keys()
            ):
                raise also(PlanError, AssertionError)(
                    "desired_output_layouts: expected the names of output_layouts, "
                    f"{given!r}; got {wanted!r}"
                )
        else:
            _check_lengths(given, wanted, "output_layouts")

    def hooks(self, path: str, module: nn.Module, mesh: DeviceMesh) -> None:
        what = self.shown(path)
        given, wanted = self.output_layouts, self.desired_output_layouts
        keys: Any = given if isinstance(given, dict) else range(len(given))
        movers = {
            key: _make_mover(
                f"result {key} of {what}", mesh, given[key], wanted[key], self.use_local_output
            )
            for key in keys
            if given[key] is not None
        }
        is_named = isinstance(given, dict)
        leave = _PrepareResults(what, len(given), list(given) if is_named else None, movers)
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
        use_local_input: whether the module gets local shards rather than DTensors.
        use_local_output: whether it returns local shards rather than DTensors.
    """

    def __init__(
        self,
        *,
        input_layouts: PositionalPlacements = None,
        desired_input_layouts: PositionalPlacements = None,
        input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        use_local_input: bool = False,
        output_layouts: PositionalPlacements | Mapping[str, Placement | None],
        desired_output_layouts: PositionalPlacements | Mapping[str, Placement | None],
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


# ---- hooks: objects rather than closures, so that modules can be pickled


@dataclass(frozen=True, eq=False, slots=True)
class _PrepareTensor:
    """Makes one argument or result a DTensor, moves it and may unwrap it."""

    what: str
    mesh: DeviceMesh
    shards: ShardLayouts
    finish: MoveOutput

    def __call__(self, value: Any) -> Any:
        if value is None:
            return None
        moved = map_tensors(value, self._move_tensor)
        if moved is value and not isinstance(value, torch.Tensor):
            raise also(PlanError, AssertionError)(
                f"{self.what}: expected a tensor, got {type(value).__name__}; say None for its "
                "layout"
            )
        return moved

    def _move_tensor(self, value: torch.Tensor) -> Any:
        if isinstance(value, DTensor):
            check_on_mesh(value, self.mesh, self.what)
            return self.finish(value)
        return self.finish(wrap_shared(value, self.shards.layout_of(value), self.what))


def _make_mover(
    what: str, mesh: DeviceMesh, given: Placement, wanted: Placement | None, use_local: bool
) -> _PrepareTensor:
    finish = make_output_move(what, wanted, use_local)
    return _PrepareTensor(what, mesh, ShardLayouts(mesh, given), finish)


@dataclass(frozen=True, eq=False, slots=True)
class _PrepareArguments:
    """A forward pre-hook that moves arguments by position and by name.

    Arguments:
        count: the number of positional arguments that the style knows; 0: any.
    """

    what: str
    count: int
    by_position: dict[int, _PrepareTensor]
    by_name: dict[str, _PrepareTensor]

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.count and len(args) > self.count:
            raise PlanError(
                f"{self.what}: expected {self.count} positional arguments, as input_layouts has, "
                f"got {len(args)}; give None for those that are left alone"
            )
        changes: dict[int | str, Any] = {}
        for at, value in enumerate(args):
            move = self.by_position.get(at)
            if move is not None:
                changes[at] = move(value)
        for name, value in kwargs.items():
            move = self.by_name.get(name)
            if move is not None:
                changes[name] = move(value)
        return replace_arguments(args, kwargs, changes)


@dataclass(frozen=True, eq=False, slots=True)
class _PrepareResults:
    """A forward hook that moves results.

    Arguments:
        count: the number of results that the style knows.
        names: the names of the fields that results must have; None for results in order.
        movers: by name, or by position.
    """

    what: str
    count: int
    names: list[str] | None
    movers: dict[Any, _PrepareTensor]

    def __call__(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        movers = self.movers
        if self.names is not None:
            check_fields(outputs, self.names, self.what)
            return replace_fields(outputs, movers)
        if is_record(outputs):
            names = field_names(outputs)
            _check_count(self.what, self.count, len(names))
            return replace_fields(outputs, {names[at]: move for at, move in movers.items()})
        if isinstance(outputs, tuple | list):
            _check_count(self.what, self.count, len(outputs))
            return replace_items(outputs, movers)
        _check_count(self.what, self.count, 1)
        return movers[0](outputs) if movers else outputs


def _as_tuple(given: PositionalPlacements, argument: str) -> tuple[Placement | None, ...]:
    if given is None:
        return ()
    placements = given if isinstance(given, tuple | list) else (given,)
    return tuple(
        None if each is None else as_placement(each, f"{argument}[{at}]")
        for at, each in enumerate(placements)
    )


def _as_tuple_or_dict(given: Any, argument: str) -> Any:
    if isinstance(given, Mapping):
        return {
            name: None if each is None else as_placement(each, f"{argument}[{name!r}]")
            for name, each in given.items()
        }
    return _as_tuple(given, argument)


def _check_lengths(given: Sequence[Any], wanted: Sequence[Any], argument: str) -> None:
    if len(given) != len(wanted):
        raise also(PlanError, AssertionError)(
            f"desired_{argument}: expected {len(given)}, as {argument} has; got {len(wanted)}"
        )


def _check_count(what: str, expected: int, found: int) -> None:
    if expected != found:
        raise PlanError(
            f"{what}: expected {expected} results, as output_layouts has, got {found}; "
            "give None for those that are left alone"
        )


# ---- torch's own styles


def is_of_torch(kind: type) -> bool:
    """Check whether a class is one of torch's own tensor parallelism."""
    return kind.__module__.startswith("torch.distributed.tensor")


def from_torch_style(style: Any) -> Any:
    """Return our style for an instance of torch's own class; anything else as it is.

    Programs that build plans without us, such as other packages, have these. A class that the user
    has derived from torch's is not converted: it works on torch's tensors.
    """
    kind = type(style)
    convert = _FROM_TORCH.get(kind.__name__) if is_of_torch(kind) else None
    if convert is None:
        return style
    result = convert(style)
    result.src_data_rank = style.src_data_rank
    return result


def _input_options(style: Any) -> dict[str, Any]:
    return {
        "input_layouts": style.input_layouts,
        "desired_input_layouts": style.desired_input_layouts,
        "input_kwarg_layouts": style.input_kwarg_layouts,
        "desired_input_kwarg_layouts": style.desired_input_kwarg_layouts,
    }


def _output_options(style: Any) -> dict[str, Any]:
    return {
        "output_layouts": style.output_layouts,
        "desired_output_layouts": style.desired_output_layouts,
        "use_local_output": style.use_local_output,
    }


_FROM_TORCH: dict[str, Callable[[Any], ModuleStyle]] = {
    "ColwiseParallel": lambda style: ColwiseParallel(
        input_layouts=style.input_layouts,
        output_layouts=style.output_layouts,
        use_local_output=style.use_local_output,
    ),
    "RowwiseParallel": lambda style: RowwiseParallel(
        input_layouts=style.input_layouts,
        output_layouts=style.output_layouts,
        use_local_output=style.use_local_output,
    ),
    "SequenceParallel": lambda style: SequenceParallel(
        sequence_dim=style.sequence_sharding[0].dim, use_local_output=style.use_local_output
    ),
    "PrepareModuleInput": lambda style: PrepareModuleInput(
        **_input_options(style), use_local_output=style.use_local_output
    ),
    "PrepareModuleOutput": lambda style: PrepareModuleOutput(**_output_options(style)),
    "PrepareModuleInputOutput": lambda style: PrepareModuleInputOutput(
        **_input_options(style.prepare_module_input),
        use_local_input=style.prepare_module_input.use_local_output,
        **_output_options(style.prepare_module_output),
    ),
}
"""From the name of torch's class to a function that makes our style of an instance."""
