"""The styles of projections and norms: ColwiseParallel, RowwiseParallel and SequenceParallel.

They have the steps of torch's classes, under torch's names: `_partition_linear_fn`,
`_prepare_input_fn`, `_prepare_output_fn`, ... A style that is derived from one of them, and
overrides such a step, is applied as torch applies it: by `distribute_module` with these steps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.api.distribute import distribute_module
from shardwise.core.errors import also
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement, Replicate, Shard
from shardwise.dtensor.tensor import DTensor
from shardwise.parallel.parameters import distribute_slots, find_slots
from shardwise.parallel.plan_spec import PlanError
from shardwise.parallel.styles import (
    ModuleStyle,
    as_single_placement,
    leave_with_one,
    leave_with_several,
    make_input_hook,
    make_output_move,
)

Pieces = int | Sequence[int] | None

_REPLICATE = Replicate()


def _prepare(tensor: Any, mesh: DeviceMesh, given: Any, wanted: Any) -> Any:
    """Make a plain tensor a DTensor with the placements `given`, and move it to `wanted`."""
    if not isinstance(tensor, DTensor):
        if not isinstance(tensor, torch.Tensor):
            raise PlanError(f"input: expected a tensor, got {type(tensor).__name__}")
        tensor = DTensor.from_local(tensor, mesh, given)
    return tensor if tensor.placements == tuple(wanted) else tensor.redistribute(placements=wanted)


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

    torch_steps = (
        "_partition_linear_fn",
        "_partition_embedding_fn",
        "_prepare_input_fn",
        "_prepare_output_fn",
    )

    input_layouts: tuple[Placement]
    output_layouts: tuple[Placement]
    desired_input_layouts: tuple[Placement]
    use_local_output: bool
    given_input: Placement | None
    """The placement of plain inputs that the user gave; None: the default for the module."""
    given_output: Placement | None
    """The placement that results are moved to; None: they stay as they are."""
    _shard_options: dict[str, Any]

    def check(self, path: str, module: nn.Module) -> None:
        if weight_kind(module) is None:
            raise also(PlanError, NotImplementedError)(
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
        given = self.given_input or wanted
        features = _input_features(module)
        enter = make_input_hook(f"input of {what}", module, mesh, given, wanted, features)
        leave = make_output_move(f"output of {what}", self.given_output, self.use_local_output)
        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(partial(leave_with_one, leave))

    # ---- torch's steps, for styles that are derived from this one

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        distribute_slots(self.layouts(name, module, device_mesh), self.src_data_rank)

    _partition_embedding_fn = _partition_linear_fn

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: Any
    ) -> Any:
        return _prepare(inputs[0], device_mesh, input_layouts, desired_input_layouts)

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, device_mesh: Any
    ) -> Any:
        outputs = _prepare(outputs, device_mesh, output_layouts, output_layouts)
        return outputs.to_local() if use_local_output else outputs

    def apply_torch_steps(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        is_embedding = weight_kind(module) == "embedding"
        wanted = (_REPLICATE,) if is_embedding else self.desired_input_layouts
        return distribute_module(
            module,
            device_mesh,
            self._partition_embedding_fn if is_embedding else self._partition_linear_fn,
            partial(self._prepare_input_fn, self.input_layouts, wanted),
            partial(self._prepare_output_fn, self.output_layouts, self.use_local_output),
        )

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
        self.given_input = as_single_placement(input_layouts, "input_layouts")
        self.given_output = as_single_placement(output_layouts, "output_layouts")
        self.input_layouts = (self.given_input or Replicate(),)
        self.output_layouts = (self.given_output or Shard(-1),)
        self.desired_input_layouts = (Replicate(),)
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
        self.given_input = as_single_placement(input_layouts, "input_layouts")
        self.given_output = as_single_placement(output_layouts, "output_layouts") or Replicate()
        self.input_layouts = (self.given_input or Shard(-1),)
        self.output_layouts = (self.given_output,)
        self.use_local_output = use_local_output
        self._shard_options = _check_shard_options(unit=unit)
        self.desired_input_layouts = (Shard(-1, **self._shard_options),)

    def of_kind(self, kind: str | None) -> dict[str, Placement]:
        return {"weight": Shard(_IN_DIM[kind], **self._shard_options), "bias": _REPLICATE}

    def wanted(self, kind: str | None) -> Placement:
        return _REPLICATE if kind == "embedding" else self.desired_input_layouts[0]


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

    torch_steps = ("_replicate_module_fn", "_prepare_input_fn", "_prepare_output_fn")

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
        module.register_forward_hook(partial(leave_with_several, leave))

    # ---- torch's steps, for styles that are derived from this one

    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        distribute_slots(self.layouts(name, module, device_mesh), self.src_data_rank)

    @staticmethod
    def _prepare_input_fn(sequence_sharding: Any, mod: Any, inputs: Any, device_mesh: Any) -> Any:
        return _prepare(inputs[0], device_mesh, sequence_sharding, sequence_sharding)

    @staticmethod
    def _prepare_output_fn(use_local_output: bool, mod: Any, outputs: Any, device_mesh: Any) -> Any:
        return outputs.to_local() if use_local_output else outputs

    def apply_torch_steps(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            self._replicate_module_fn,
            partial(self._prepare_input_fn, self.sequence_sharding),
            partial(self._prepare_output_fn, self.use_local_output),
        )

    def __repr__(self) -> str:
        (split,) = self.sequence_sharding
        return (
            f"SequenceParallel(sequence_dim={split.dim}, use_local_output={self.use_local_output})"
        )
