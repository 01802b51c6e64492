"""tensor_parallel_transformation: a rank's program by torch's styles of modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram

from shardwise.core import world
from shardwise.core.errors import ExportError
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement, Replicate, Shard, as_placement
from shardwise.export.boundaries import Boundary, BoundaryMoves, ProgramModule, find_modules
from shardwise.export.placements import NAME_REMEDY, ProgramInputs
from shardwise.export.program import ProgramSharder, check_is_program
from shardwise.export.recording import GroupNaming, RecordingWorld, register_ranks
from shardwise.parallel.plan_spec import check_pattern, matches, no_match_error
from shardwise.parallel.prepare import (
    PrepareModuleInput,
    PrepareModuleOutput,
    from_torch_style,
    is_of_torch,
)
from shardwise.parallel.projections import (
    ColwiseParallel,
    ProjectionStyle,
    RowwiseParallel,
    SequenceParallel,
)

_ARGUMENT = "parallel_strategies"


def tensor_parallel_transformation(
    exported_program: ExportedProgram,
    rank: int,
    world_size: int,
    device_type: str,
    parallel_strategies: Mapping[str, Any],
) -> ExportedProgram:
    """Return the program of one rank of a tensor-parallel group, by the styles of its modules.

    It needs no process group: the programs of all ranks can be made anywhere. Their collectives
    name the default group of the processes that will run them. Inputs and outputs are those of the
    original, replicated; use `shard_program` for others.

    Arguments:
        exported_program: the program of a model in one process; it is not changed.
        rank: the rank whose program is returned.
        world_size: the number of ranks.
        device_type: the type of device that will run it, such as "cpu" or "cuda".
        parallel_strategies: styles by the name of a module, or by a pattern for names. A style is
            an instance of `shardwise.parallel`'s or torch's own; its class, for its defaults; or
            "colwise", "rowwise", "sequence" or "replicate". `input_layouts` are not needed, as the
            layouts of all tensors in a program are known; `output_layouts` say where results go.

    Example:
        >>> program = torch.export.export(model, (x,))
        >>> plan = {"layers.*.up": ColwiseParallel, "layers.*.down": "rowwise"}
        >>> local = tensor_parallel_transformation(program, 0, 2, "cpu", plan)
    """
    check_is_program(exported_program)
    _check_rank(rank, world_size)
    _check_device_type(device_type)
    plan, boundaries = _convert_strategies(exported_program, parallel_strategies)
    recording = RecordingWorld(rank, world_size, _group_naming(world_size))
    with world.use(recording):
        mesh = DeviceMesh(device_type, torch.arange(world_size), mesh_dim_names=("tp",))
    moves = BoundaryMoves(exported_program, boundaries, mesh)
    return ProgramSharder(exported_program, mesh, recording, plan, moves=moves).program()


def _check_rank(rank: Any, world_size: Any) -> None:
    for name, value, least in (("world_size", world_size, 1), ("rank", rank, 0)):
        if type(value) is not int or value < least:
            raise ExportError(f"{name}: expected an int of at least {least}, got {value!r}")
    if rank >= world_size:
        raise ExportError(f"rank: expected less than world_size ({world_size}), got {rank}")


def _check_device_type(device_type: Any) -> None:
    try:
        is_known = isinstance(device_type, str) and torch.device(device_type).type == device_type
    except RuntimeError:
        is_known = False
    if not is_known:
        raise ExportError(
            f'device_type: expected a kind of device, such as "cpu" or "cuda", got {device_type!r}'
        )


def _group_naming(world_size: int) -> GroupNaming | None:
    """Return the names of torch's groups, if there is one process for each rank."""
    current = world.current(start=False)
    if current.is_simulated or current.size != world_size or world_size == 1:
        return None
    return lambda ranks: register_ranks(ranks, current)


# ---- from styles to placements and boundaries


def _convert_strategies(
    program: ExportedProgram, strategies: Any
) -> tuple[dict[str, Any], dict[str, Boundary]]:
    """Return placements of parameters, by name, and boundaries of modules, by path."""
    if not isinstance(strategies, Mapping):
        raise ExportError(
            f"{_ARGUMENT}: expected a dict of styles by names of modules, got "
            f"{type(strategies).__name__}"
        )
    modules = find_modules(program)
    chosen: dict[str, Any] = {}
    plan: dict[str, Any] = {}
    boundaries: dict[str, Boundary] = {}
    for pattern, given in strategies.items():
        check_pattern(_ARGUMENT, pattern)
        style = _as_style(given, f"{_ARGUMENT}[{pattern!r}]")
        fitting = [path for path in modules if matches(pattern, path)]
        if not fitting:
            tensors = [*program.state_dict, *program.constants]
            meant = "which is a parameter or buffer: styles are for the module that has it"
            raise no_match_error(
                _ARGUMENT, pattern, modules, "modules", tensors, meant, NAME_REMEDY
            )
        for path in fitting:
            if chosen.setdefault(path, style) != style:
                raise ExportError(f"{path}: it is given {chosen[path]!r} and {style!r}; choose one")
            placements, boundaries[path] = _CONVERTERS[type(style)](style, modules[path])
            plan |= {
                modules[path].full_name(name): [placement] for name, placement in placements.items()
            }
    _check_ties(ProgramInputs(program), plan)
    return plan, boundaries


def _check_ties(inputs: ProgramInputs, plan: Mapping[str, Any]) -> None:
    for names in inputs.state_names.values():
        asked = {name: plan[name] for name in names if name in plan}
        if any(each != next(iter(asked.values())) for each in asked.values()):
            listed = ", ".join(f"{name} {placement}" for name, (placement,) in asked.items())
            raise ExportError(
                f"{_ARGUMENT}: they are one tensor, and the styles lay it out differently: {listed}"
            )


@dataclass(frozen=True)
class _ReplicateStyle:
    """The style "replicate": every rank computes all of a module."""

    def __repr__(self) -> str:
        return '"replicate"'


_BY_NAME: dict[str, Callable[[], Any]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "sequence": SequenceParallel,
    "replicate": _ReplicateStyle,
}


def _as_style(given: Any, argument: str) -> Any:
    """Return our style for a name, for a class, or for an instance of torch's class or ours."""
    if isinstance(given, str) and given in _BY_NAME:
        return _BY_NAME[given]()
    if inspect.isclass(given) and (given in _CONVERTERS or is_of_torch(given)):
        try:
            given = given()
        except TypeError as error:
            raise ExportError(f"{argument}: {given.__name__} has no defaults ({error})") from None
    given = from_torch_style(given)
    if type(given) in _CONVERTERS:
        return given
    raise ExportError(
        f"{argument}: expected ColwiseParallel, RowwiseParallel, SequenceParallel or "
        f"PrepareModuleInput or -Output, as a class or an instance, or one of "
        f"{', '.join(map(repr, _BY_NAME))}; got {given!r}. "
        "Placements are for shard_program"
    )


Converted = tuple[Mapping[str, Placement], Boundary]
"""Placements of a module's own tensors, by their names in it, and its boundary."""


def _make_boundary(inputs: Placement | None = None, outputs: Placement | None = None) -> Boundary:
    """Return a boundary on a mesh of one axis."""
    return Boundary(None if inputs is None else [inputs], None if outputs is None else [outputs])


def _convert_projection(style: ProjectionStyle, module: ProgramModule) -> Converted:
    is_colwise = isinstance(style, ColwiseParallel)
    inputs: Placement | None = Replicate()
    kind = module.weight_kind()
    if kind is not None:
        asked = style.of_kind(kind)
        # The channels of an image are not its last dim: the convolution's rule moves its input.
        inputs = style.wanted(kind) if len(module.shapes["weight"]) == 2 else None
        placements = {name: each for name, each in asked.items() if name in module.shapes}
    elif is_colwise and len(module.shapes.get("weight", ())) == 1:  # the channels of a norm
        inputs = None
        shape = module.shapes["weight"]
        placements = {name: Shard(0) for name, each in module.shapes.items() if each == shape}
    elif is_colwise and any("proj_weight" in name for name in module.shapes):
        placements = _attention_placements(style, module)
    else:
        own = ", ".join(f"{name} {list(shape)}" for name, shape in module.shapes.items())
        raise ExportError(
            f"{_ARGUMENT}: {module.path or 'the module itself'} has no weight that "
            f"{type(style).__name__} could split (it has {own or 'no parameters of its own'}); "
            "name the projections in it, or use shard_program, which lays out any parameter"
        )
    return placements, _make_boundary(inputs, style.given_output)


def _attention_placements(style: ProjectionStyle, module: ProgramModule) -> dict[str, Placement]:
    """Return the placements of nn.MultiheadAttention's input projections, fused or separate."""
    fused = {"in_proj_weight": 3, "in_proj_bias": 3}
    separate = dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), 1)
    bias = style.of_kind("linear")["bias"]
    unit = bias.unit if isinstance(bias, Shard) else 1
    return {
        name: Shard(0, pieces=pieces, unit=unit)
        for name, pieces in (fused | separate).items()
        if name in module.shapes
    }


def _convert_sequence(style: SequenceParallel, module: ProgramModule) -> Converted:
    replicated = dict.fromkeys(module.shapes, Replicate())
    return replicated, _make_boundary(inputs=style.sequence_sharding[0])


def _convert_replicate(style: _ReplicateStyle, module: ProgramModule) -> Converted:
    replicated = dict.fromkeys(module.shapes, Replicate())
    return replicated, _make_boundary(inputs=Replicate())


def _convert_input(style: PrepareModuleInput, module: ProgramModule) -> Converted:
    wanted = [*style.desired_input_layouts, *style.desired_input_kwarg_layouts.values()]
    return {}, _make_boundary(inputs=_single_placement(wanted, module))


def _convert_output(style: PrepareModuleOutput, module: ProgramModule) -> Converted:
    wanted: Any = style.desired_output_layouts
    wanted = wanted.values() if isinstance(wanted, Mapping) else wanted
    return {}, _make_boundary(outputs=_single_placement(list(wanted), module))


def _single_placement(wanted: list[Any], module: ProgramModule) -> Placement | None:
    """Return the one placement among these; raise if there are several.

    A program does not say which tensor is which argument of a module.
    """
    found = {as_placement(each, module.path) for each in wanted if each is not None}
    if len(found) > 1:
        raise ExportError(
            f"{_ARGUMENT}: {module.path or 'the module itself'} should have tensors laid out "
            f"differently ({', '.join(map(repr, found))}), and a program does not say which "
            "argument is which; give styles to the modules in it"
        )
    return next(iter(found), None)


_CONVERTERS: dict[type, Callable[..., Converted]] = {
    ColwiseParallel: _convert_projection,
    RowwiseParallel: _convert_projection,
    SequenceParallel: _convert_sequence,
    PrepareModuleInput: _convert_input,
    PrepareModuleOutput: _convert_output,
    _ReplicateStyle: _convert_replicate,
}
