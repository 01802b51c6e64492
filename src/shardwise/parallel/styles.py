"""Styles of tensor parallelism, with torch's names and arguments.

A style says how one module's parameters are laid out, and which hooks move its inputs and outputs.
This file has the base classes, the common parts, and the styles of projections and norms;
`prepare.py` has the styles that change inputs and outputs only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh, mesh_or_current
from shardwise.core.placement import Placement, Replicate, Shard, as_placement
from shardwise.dtensor.tensor import DTensor, unwrap
from shardwise.parallel.activations import (
    MoveFirstArgument,
    Redistributor,
    ShardLayouts,
    check_on_mesh,
    wrap_shared,
)
from shardwise.parallel.containers import forward_arguments, map_tensors
from shardwise.parallel.parameters import (
    TensorSlot,
    check_ties,
    distribute_slots,
    find_slots,
    layout_for,
)
from shardwise.parallel.plan_spec import PlanError, join_names
from shardwise.torch_internals import forward_pre_hooks

Pieces = int | Sequence[int] | None


class ParallelStyle(ABC):
    """A way to make a module parallel. A style of your own implements `_apply`."""

    src_data_rank: int | None = 0
    """The rank whose parameters all ranks get; with None each rank keeps its own."""

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Make the module parallel, in place."""


class ModuleStyle(ParallelStyle):
    """A style that has separate steps to check a module and to change it.

    So a whole plan can be checked before any module is changed.
    """

    def shown(self, path: str) -> str:
        """Format a module and its style for errors."""
        return f"{path or 'the module'} ({type(self).__name__})"

    def check(self, path: str, module: nn.Module) -> None:
        """Raise PlanError, with the names of module and style, if the style does not fit."""

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Return placements of parameters and buffers by name; others are left as they are."""
        return {}

    @abstractmethod
    def hooks(self, path: str, module: nn.Module, mesh: DeviceMesh) -> None:
        """Register the hooks that move inputs and outputs of the module's forward."""

    def layouts(
        self, path: str, module: nn.Module, mesh: DeviceMesh
    ) -> list[tuple[TensorSlot, Layout]]:
        """Return the parameters and buffers that `placements` names, with their layouts."""
        wanted = self.placements(module)
        slots = {slot.path: slot for slot in find_slots(module, path)}
        found = []
        for name, placement in wanted.items():
            slot = slots[join_names(path, name)]
            found.append((slot, layout_for(slot, mesh, [placement])))
        return found

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = as_one_axis_mesh(device_mesh)
        self.check("", module)
        check_unstyled("", module, self)
        layouts = self.layouts("", module, mesh)
        check_ties(layouts)
        distribute_slots(layouts, self.src_data_rank)
        self.hooks("", module, mesh)
        return module

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))


# ---- what all styles share


def as_one_axis_mesh(device_mesh: Any) -> DeviceMesh:
    """Return the mesh of a style, or raise PlanError if it does not have exactly one axis."""
    mesh = mesh_or_current(device_mesh)
    if mesh.ndim != 1:
        name = (mesh.mesh_dim_names or ("tp",))[-1]
        raise PlanError(
            f"device_mesh: expected one axis, got {mesh.axes_shown()}; pass the axis of tensor "
            f"parallelism, device_mesh[{name!r}], or use shard_module for all axes at once"
        )
    return mesh


def as_single_placement(given: Any, argument: str) -> Placement | None:
    """Return the placement that a style's argument gives: itself, in a tuple of one, or None."""
    if isinstance(given, tuple | list) and len(given) == 1:
        (given,) = given
    if given is None:
        return None
    return as_placement(given, argument)


_REPLICATE = Replicate()


class _StyledInput(MoveFirstArgument):
    """The hook of a styled module, by which `check_unstyled` knows it."""

    __slots__ = ()


@dataclass(frozen=True, eq=False, slots=True)
class _MoveInput:
    """Makes an input a DTensor and redistributes it.

    Arguments:
        shards: the layouts of plain tensors, which are local shards.
    """

    what: str
    mesh: DeviceMesh
    shards: ShardLayouts
    redistribute: Redistributor

    def __call__(self, value: torch.Tensor) -> DTensor:
        if isinstance(value, DTensor):
            check_on_mesh(value, self.mesh, self.what)
        else:
            value = wrap_shared(value, self.shards.layout_of(value), self.what)
        return self.redistribute(value)


def make_input_hook(
    what: str,
    module: nn.Module,
    mesh: DeviceMesh,
    given: Placement,
    wanted: Placement,
    features: int | None = None,
) -> Callable[..., Any]:
    """Return a forward pre-hook that redistributes a module's first tensor argument, as a DTensor.

    Arguments:
        what: the argument's name in errors.
        given: the placement that a plain tensor is assumed to have.
        wanted: the placement that the module needs.
        features: the global size of the last dim, if the module knows it.
    """
    shards = ShardLayouts(mesh, given, features)
    move = _MoveInput(what, mesh, shards, _redistribute_to(what, wanted))
    return _StyledInput(forward_arguments(module).named, move, what)


def check_unstyled(path: str, module: nn.Module, style: ModuleStyle) -> None:
    """Raise PlanError for a module that has a style already: two styles would both unwrap its
    result to a local tensor."""
    is_styled = any(isinstance(hook, _StyledInput) for hook in forward_pre_hooks(module))
    if is_styled and style.placements(module):
        raise PlanError(
            f"{path or 'the module'}: a call before this one gave it a style that lays out its "
            f"parameters, and now it should get {style!r}; parallelize a module once"
        )


def _redistribute_to(what: str, placement: Placement) -> Redistributor:
    """Return a function that moves DTensors on a mesh of one axis to a placement."""
    return Redistributor(what, partial(_with_placement, placement=placement))


def _with_placement(layout: Layout, placement: Placement) -> Layout:
    return Layout.from_placements(layout.mesh, layout.shape, [placement])


@dataclass(frozen=True, eq=False, slots=True)
class MoveOutput:
    """Moves a result to a placement, if one is given, and then unwraps it if `use_local_output`."""

    what: str
    redistribute: Redistributor | None
    use_local_output: bool

    def __call__(self, output: DTensor) -> Any:
        if not isinstance(output, DTensor):
            raise PlanError(
                f"{self.what}: expected its forward to return a DTensor, got "
                f"{type(output).__name__}; does a hook of its own change the result?"
            )
        if self.redistribute is not None:
            output = self.redistribute(output)
        return unwrap(output) if self.use_local_output else output


def make_output_move(what: str, placement: Placement | None, use_local_output: bool) -> MoveOutput:
    """Return the move of a result to a placement, if one is given."""
    redistribute = None if placement is None else _redistribute_to(what, placement)
    return MoveOutput(what, redistribute, use_local_output)


def _leave_with_one(move: MoveOutput, module: nn.Module, args: Any, output: Any) -> Any:
    return move(output)


def _leave_with_several(move: MoveOutput, module: nn.Module, args: Any, output: Any) -> Any:
    return map_tensors(output, lambda each: move(each) if isinstance(each, DTensor) else each)


# ---- projections


def weight_kind(module: nn.Module) -> str | None:
    """Return the meaning of the dims of a module's weight; None if the module is no projection.

    "linear" means (out, in), "transposed" (in, out), and "embedding" (rows, features).
    """
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # transformers', in GPT-2
        return "transposed"
    return None


# The dim of the weight that has the outputs, and the one that has the inputs, by `weight_kind`.
_OUT_DIM: dict[str | None, int] = {"linear": 0, "transposed": 1, "embedding": 1}
_IN_DIM: dict[str | None, int] = {"linear": 1, "transposed": 0, "embedding": 0}


def _input_features(module: nn.Module) -> int | None:
    """Return the size of the last dim of a projection's input; None for indices."""
    kind = weight_kind(module)
    weight: Any = module.weight
    return None if kind == "embedding" else int(weight.shape[_IN_DIM[kind]])


def _check_shard_options(**options: Any) -> dict[str, Any]:
    """Return the options of `Shard` that are not its defaults; raise if they are invalid."""
    asked = {name: each for name, each in options.items() if each not in (None, 1)}
    Shard(0, **asked)
    return asked


class ProjectionStyle(ModuleStyle):
    """The common part of column-wise and row-wise parallelism."""

    input_layouts: tuple[Placement | None]
    output_layouts: tuple[Placement | None]
    use_local_output: bool
    _shard_options: dict[str, Any]

    def check(self, path: str, module: nn.Module) -> None:
        if weight_kind(module) is None:
            raise PlanError(
                f"{path or 'the module'}: {type(self).__name__} fits nn.Linear, nn.Embedding and "
                f"transformers' Conv1D, and this is {type(module).__name__}; name the projections "
                "in it, or use shard_module, which lays out any parameter"
            )

    @abstractmethod
    def of_kind(self, kind: str | None) -> dict[str, Placement]:
        """Return the placements of weight and bias of a module of this `weight_kind`."""

    @abstractmethod
    def wanted(self, kind: str | None) -> Placement:
        """Return the placement that a module of this `weight_kind` needs for its input."""

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        # Parameters that a subclass may have added are replicated.
        own: dict[str, Placement] = {slot.path: _REPLICATE for slot in find_slots(module)}
        known = self.of_kind(weight_kind(module))
        return own | {name: each for name, each in known.items() if name in own}

    def hooks(self, path: str, module: nn.Module, mesh: DeviceMesh) -> None:
        what, wanted = self.shown(path), self.wanted(weight_kind(module))
        given = self.input_layouts[0] or wanted
        features = _input_features(module)
        enter = make_input_hook(f"input of {what}", module, mesh, given, wanted, features)
        leave = make_output_move(f"output of {what}", self.output_layouts[0], self.use_local_output)
        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(partial(_leave_with_one, leave))

    def __repr__(self) -> str:
        extra = "".join(f", {name}={each}" for name, each in self._shard_options.items())
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, output_layouts="
            f"{self.output_layouts}, use_local_output={self.use_local_output}{extra})"
        )


class ColwiseParallel(ProjectionStyle):
    """Split the outputs of a Linear or Embedding over the ranks.

    Forward: every rank gets the whole input and computes its columns of the output. Backward: an
    all-reduce sums the gradient of the input, once for all modules with the same input.

    Arguments:
        input_layouts: the placement of a plain input: `Replicate()` by default.
        output_layouts: the placement of the output: split along its last dim by default.
        use_local_output: whether to return the local shard rather than a DTensor.
        pieces: for a fused projection, as of queries, keys and values: the number of equal pieces
            that the outputs consist of, or their lengths; each piece is split by itself.
        unit: the size that is never split, such as that of a head; one for all pieces, or for each.

    Example:
        >>> plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        >>> parallelize_module(mlp, mesh["tp"], plan)
        >>> qkv = ColwiseParallel(pieces=(512, 128, 128), unit=64)  # heads of 64: 8, 2 and 2
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        pieces: Pieces = None,
        unit: int | Sequence[int] = 1,
    ) -> None:
        self.input_layouts = (as_single_placement(input_layouts, "input_layouts") or Replicate(),)
        self.output_layouts = (as_single_placement(output_layouts, "output_layouts"),)
        self.use_local_output = use_local_output
        self._shard_options = _check_shard_options(pieces=pieces, unit=unit)

    def of_kind(self, kind: str | None) -> dict[str, Placement]:
        weight = Shard(_OUT_DIM[kind], **self._shard_options)
        return {"weight": weight, "bias": Shard(0, **self._shard_options)}

    def wanted(self, kind: str | None) -> Placement:
        return _REPLICATE


class RowwiseParallel(ProjectionStyle):
    """Split the inputs of a Linear, or the rows of an Embedding, over the ranks.

    Forward: every rank has its columns of the input and computes a contribution to the output,
    which an all-reduce sums (a reduce-scatter, if the output is to be split). Backward: no
    communication (an all-gather).

    Arguments:
        input_layouts: the placement of a plain input: split along its last dim by default; the
            indices for an Embedding are replicated by default.
        output_layouts: the placement of the output: `Replicate()` by default.
        use_local_output: whether to return the local shard rather than a DTensor.
        unit: the size that is never split, such as that of a head; the same as in the
            `ColwiseParallel` that computes the input.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        unit: int = 1,
    ) -> None:
        self.input_layouts = (as_single_placement(input_layouts, "input_layouts"),)
        self.output_layouts = (
            as_single_placement(output_layouts, "output_layouts") or Replicate(),
        )
        self.use_local_output = use_local_output
        self._shard_options = _check_shard_options(unit=unit)

    def of_kind(self, kind: str | None) -> dict[str, Placement]:
        return {"weight": Shard(_IN_DIM[kind], **self._shard_options), "bias": _REPLICATE}

    def wanted(self, kind: str | None) -> Placement:
        return _REPLICATE if kind == "embedding" else Shard(-1, **self._shard_options)


# ---- norms


class SequenceParallel(ModuleStyle):
    """Run a module that treats each position by itself, as norms do, on a split sequence.

    Its parameters are replicated; frozen ones stay frozen. Forward: no communication, if the input
    is split along the sequence already. Backward: gradients of parameters are summed over the
    ranks.

    Arguments:
        sequence_dim: the dim of the input that is split.
        use_local_output: whether to return the local shard rather than a DTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        return {slot.path: _REPLICATE for slot in find_slots(module)}

    def hooks(self, path: str, module: nn.Module, mesh: DeviceMesh) -> None:
        what = self.shown(path)
        (split,) = self.sequence_sharding
        enter = make_input_hook(f"input of {what}", module, mesh, split, split)
        leave = make_output_move(f"output of {what}", None, self.use_local_output)
        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(partial(_leave_with_several, leave))

    def __repr__(self) -> str:
        (split,) = self.sequence_sharding
        return (
            f"SequenceParallel(sequence_dim={split.dim}, use_local_output={self.use_local_output})"
        )
