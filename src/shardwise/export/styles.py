"""tensor_parallel_transformation: a program for one rank, by torch's styles."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram

from shardwise import world
from shardwise.export.boundaries import Boundaries, Boundary
from shardwise.export.errors import ExportError
from shardwise.export.groups import registered
from shardwise.export.modules import ProgramModule, modules_of
from shardwise.export.plan import NO_NAME, Inputs
from shardwise.export.program import Sharding
from shardwise.export.recording import RecordingWorld
from shardwise.mesh import DeviceMesh
from shardwise.parallel import prepare, styles
from shardwise.parallel.names import check_pattern, matches, unmatched
from shardwise.placement import Placement, Replicate, Shard, as_placement

_ARGUMENT = "parallel_strategies"


def tensor_parallel_transformation(
    exported_program: ExportedProgram,
    rank: int,
    world_size: int,
    device_type: str,
    parallel_strategies: Mapping[str, Any],
) -> ExportedProgram:
    """The program of one rank of a tensor-parallel group, by the styles of its modules.

    Needs no process group: the programs of all ranks can be made anywhere. The collectives name the
    default group of the processes that will run it. Inputs and outputs are those of the original,
    whole on every rank; `shard_program` is for others.

    Arguments:
        exported_program: of a model in one process; it is not changed.
        rank: whose program is wanted.
        world_size: the number of ranks.
        device_type: where it will run, such as "cpu" or "cuda".
        parallel_strategies: by the name of a module, or a pattern for names: a style, of
            `shardwise.parallel` or torch's own; its class, for its defaults; or "colwise",
            "rowwise", "sequence" or "replicate". As everything in a program is known to lie
            somehow, `input_layouts` are not needed; `output_layouts` say where results go.

    Example:
        >>> program = torch.export.export(model, (x,))
        >>> plan = {"layers.*.up": ColwiseParallel, "layers.*.down": "rowwise"}
        >>> local = tensor_parallel_transformation(program, 0, 2, "cpu", plan)
    """
    if not isinstance(exported_program, ExportedProgram):
        raise ExportError(
            "exported_program: expected what torch.export.export(model, args) returns, got "
            f"{type(exported_program).__name__}"
        )
    _check_rank(rank, world_size)
    _check_device_type(device_type)
    plan, boundaries = _laid_out(exported_program, parallel_strategies)
    recording = RecordingWorld(rank, world_size, _group_names(world_size))
    with world.use(recording):
        mesh = DeviceMesh(device_type, torch.arange(world_size), mesh_dim_names=("tp",))
    moves = Boundaries(exported_program, boundaries, mesh)
    return Sharding(exported_program, mesh, recording, plan, moves=moves).program()


def _check_rank(rank: Any, world_size: Any) -> None:
    for name, value, least in (("world_size", world_size, 1), ("rank", rank, 0)):
        if type(value) is not int or value < least:
            raise ExportError(f"{name}: expected an int of at least {least}, got {value!r}")
    if rank >= world_size:
        raise ExportError(f"rank: expected less than world_size ({world_size}), got {rank}")


def _check_device_type(device_type: Any) -> None:
    try:
        known = isinstance(device_type, str) and torch.device(device_type).type == device_type
    except RuntimeError:
        known = False
    if not known:
        raise ExportError(
            f'device_type: expected a kind of device, such as "cpu" or "cuda", got {device_type!r}'
        )


def _group_names(world_size: int) -> Callable[[tuple[int, ...]], str] | None:
    """What torch calls the default group, if these processes have one of this size."""
    here = world.current(start=False)
    if here.is_simulated or here.size != world_size or world_size == 1:
        return None
    return lambda ranks: registered(ranks, here)


# ---- from styles to placements


def _laid_out(
    program: ExportedProgram, strategies: Any
) -> tuple[dict[str, Any], dict[str, Boundary]]:
    """How parameters lie, by name, and tensors at the boundaries of modules, by path."""
    if not isinstance(strategies, Mapping):
        raise ExportError(
            f"{_ARGUMENT}: expected a dict of styles by names of modules, got "
            f"{type(strategies).__name__}"
        )
    modules = modules_of(program)
    chosen: dict[str, Any] = {}
    plan: dict[str, Any] = {}
    boundaries: dict[str, Boundary] = {}
    for pattern, given in strategies.items():
        check_pattern(_ARGUMENT, pattern)
        style = as_style(given, f"{_ARGUMENT}[{pattern!r}]")
        fitting = [path for path in modules if matches(pattern, path)]
        if not fitting:
            tensors = [*program.state_dict, *program.constants]
            meant = "which is a parameter or buffer: styles are for the module that has it"
            raise unmatched(_ARGUMENT, pattern, modules, "modules", tensors, meant, NO_NAME)
        for path in fitting:
            if chosen.setdefault(path, style) != style:
                raise ExportError(f"{path}: it is given {chosen[path]!r} and {style!r}; choose one")
            placements, boundary = _LAID[type(style)](style, modules[path])
            plan |= {name: [each] for name, each in placements.items()}
            boundaries[path] = boundary
    _check_ties(Inputs(program), plan)
    return plan, boundaries


def _check_ties(inputs: Inputs, plan: Mapping[str, Any]) -> None:
    for names in inputs.names.values():
        asked = {name: plan[name] for name in names if name in plan}
        if any(each != next(iter(asked.values())) for each in asked.values()):
            shown = ", ".join(f"{name} {placement}" for name, (placement,) in asked.items())
            raise ExportError(
                f"{_ARGUMENT}: they are one tensor, and the styles lay it out differently: {shown}"
            )


class _Replicated:
    """Every rank computes all of a module."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Replicated)

    def __hash__(self) -> int:
        return hash(_Replicated)

    def __repr__(self) -> str:
        return '"replicate"'


_NAMED: dict[str, Callable[[], Any]] = {
    "colwise": styles.ColwiseParallel,
    "rowwise": styles.RowwiseParallel,
    "sequence": styles.SequenceParallel,
    "replicate": _Replicated,
}


def as_style(given: Any, argument: str) -> Any:
    """A style of ours, from its name, its class, or torch's class or instance."""
    if isinstance(given, str) and given in _NAMED:
        return _NAMED[given]()
    if inspect.isclass(given) and given.__name__ in _FROM_TORCH:
        try:
            given = given()
        except TypeError as error:
            raise ExportError(f"{argument}: {given.__name__} has no defaults ({error})") from None
    if type(given) in _LAID:
        return given
    kind = type(given)
    if kind.__name__ in _FROM_TORCH and kind.__module__.startswith("torch.distributed.tensor"):
        return _FROM_TORCH[kind.__name__](given)
    raise ExportError(
        f"{argument}: expected ColwiseParallel, RowwiseParallel, SequenceParallel or "
        f"PrepareModuleInput or -Output, as a class or an instance, or one of "
        f"{', '.join(map(repr, _NAMED))}; got {given!r}. "
        "Placements are for shard_program"
    )


_FROM_TORCH: dict[str, Callable[[Any], Any]] = {
    "ColwiseParallel": lambda theirs: styles.ColwiseParallel(
        input_layouts=theirs.input_layouts, output_layouts=theirs.output_layouts
    ),
    "RowwiseParallel": lambda theirs: styles.RowwiseParallel(
        input_layouts=theirs.input_layouts, output_layouts=theirs.output_layouts
    ),
    "SequenceParallel": lambda theirs: styles.SequenceParallel(
        sequence_dim=theirs.sequence_sharding[0].dim
    ),
    "PrepareModuleInput": lambda theirs: prepare.PrepareModuleInput(
        input_layouts=theirs.input_layouts,
        desired_input_layouts=theirs.desired_input_layouts,
        input_kwarg_layouts=theirs.input_kwarg_layouts,
        desired_input_kwarg_layouts=theirs.desired_input_kwarg_layouts,
    ),
    "PrepareModuleOutput": lambda theirs: prepare.PrepareModuleOutput(
        output_layouts=theirs.output_layouts, desired_output_layouts=theirs.desired_output_layouts
    ),
}

Laid = tuple[dict[str, Placement], Boundary]


def _boundary(entering: Placement | None = None, leaving: Placement | None = None) -> Boundary:
    """On a mesh of one axis."""
    return Boundary(
        None if entering is None else [entering], None if leaving is None else [leaving]
    )


def _of_projection(style: styles.Projection, module: ProgramModule) -> Laid:
    columns = isinstance(style, styles.ColwiseParallel)
    entering: Placement | None = Replicate()
    kind = module.kind()
    if kind is not None:
        asked = style.of_kind(kind)
        # The channels of images are no last dim; what a convolution needs, its rule knows.
        entering = style.wanted(kind) if len(module.shapes["weight"]) == 2 else None
        placements = {name: each for name, each in asked.items() if name in module.shapes}
    elif columns and len(module.shapes.get("weight", ())) == 1:  # channels of a norm
        entering = None
        shape = module.shapes["weight"]
        placements = {name: Shard(0) for name, each in module.shapes.items() if each == shape}
    elif columns and any("proj_weight" in name for name in module.shapes):
        placements = _of_attention(style, module)
    else:
        held = ", ".join(f"{name} {list(shape)}" for name, shape in module.shapes.items())
        raise ExportError(
            f"{_ARGUMENT}: {module.path or 'the module itself'} has no weight that "
            f"{type(style).__name__} could split (it has {held or 'no parameters of its own'}); "
            "name the projections in it, or use shard_program, which lays out any parameter"
        )
    leaving = style.output_layouts[0]
    named = {module.name_of(name): each for name, each in placements.items()}
    return named, _boundary(entering, leaving)


def _of_attention(style: styles.Projection, module: ProgramModule) -> dict[str, Placement]:
    """The input projections of nn.MultiheadAttention: fused, or one for each."""
    fused = {"in_proj_weight": 3, "in_proj_bias": 3}
    single = dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), 1)
    own = style.of_kind("linear")["bias"]
    unit = own.unit if isinstance(own, Shard) else 1
    return {
        name: Shard(0, pieces=pieces, unit=unit)
        for name, pieces in (fused | single).items()
        if name in module.shapes
    }


def _of_sequence(style: styles.SequenceParallel, module: ProgramModule) -> Laid:
    whole = dict.fromkeys(map(module.name_of, module.shapes), Replicate())
    return {**whole}, _boundary(entering=style.sequence_sharding[0])


def _of_replicated(style: _Replicated, module: ProgramModule) -> Laid:
    whole = dict.fromkeys(map(module.name_of, module.shapes), Replicate())
    return {**whole}, _boundary(entering=Replicate())


def _of_input(style: prepare.PrepareModuleInput, module: ProgramModule) -> Laid:
    wanted = [*style.desired_input_layouts, *style.desired_input_kwarg_layouts.values()]
    return {}, _boundary(entering=_only(wanted, module))


def _of_output(style: prepare.PrepareModuleOutput, module: ProgramModule) -> Laid:
    wanted: Any = style.desired_output_layouts
    wanted = wanted.values() if isinstance(wanted, Mapping) else wanted
    return {}, _boundary(leaving=_only(list(wanted), module))


def _only(wanted: list[Any], module: ProgramModule) -> Placement | None:
    """The placement that is asked for; a program does not say which argument is which."""
    found = {as_placement(each, module.path) for each in wanted if each is not None}
    if len(found) > 1:
        raise ExportError(
            f"{_ARGUMENT}: {module.path or 'the module itself'} should have tensors laid out "
            f"differently ({', '.join(map(repr, found))}), and a program does not say which "
            "argument is which; give styles to the modules in it"
        )
    return next(iter(found), None)


_LAID: dict[type, Callable[..., Laid]] = {
    styles.ColwiseParallel: _of_projection,
    styles.RowwiseParallel: _of_projection,
    styles.SequenceParallel: _of_sequence,
    prepare.PrepareModuleInput: _of_input,
    prepare.PrepareModuleOutput: _of_output,
    _Replicated: _of_replicated,
}
