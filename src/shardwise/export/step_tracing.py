"""Trace a training step: run it on DTensors without data, and record the graph of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.overrides import TorchFunctionMode

from shardwise.comm import Cause
from shardwise.comm.trace import current_cause, trace_scope
from shardwise.core import world
from shardwise.core.errors import ExportError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.dtensor.tensor import DTensor, unwrap, wrap
from shardwise.export.annotations import (
    MODULE,
    NAME,
    annotate_tensor,
    find_constants,
    finish_annotations,
    node_of,
    propagate_values,
    set_annotation,
)
from shardwise.export.operators import is_random
from shardwise.export.placements import StepArgument, StepLeaf, as_output_placements
from shardwise.export.random import find_draws_of_function, match_draws
from shardwise.export.recording import RecordingWorld
from shardwise.export.simplify import clean, simplify
from shardwise.export.tracing import as_local_shard, as_recorded_dtensor, record_graph
from shardwise.torch_internals import (
    FakeTensorMode,
    pytree,
    rename_node,
    version_of,
    without_torch_function,
)

_META = torch.device("meta")

StepFunction = Callable[..., tuple[Any, Any]]


TENSOR_RESULT = object()
"""Stands for a tensor in the tree of a step's results: the graph returns it."""


class StepTracer:
    """Traces a step function as one rank.

    Arguments:
        fn: the step function of the user.
        layouts: the layouts of the tensors of its arguments, by name.
        mesh: the ranks, as a mesh in the world `recording`.
        recording: the world of the rank.
        output_placements: the argument of the user's call.
    """

    def __init__(
        self,
        fn: StepFunction,
        arguments: Sequence[StepArgument],
        layouts: Mapping[str, Layout],
        mesh: DeviceMesh,
        recording: RecordingWorld,
        output_placements: Any,
    ) -> None:
        self._fn, self._arguments, self._layouts = fn, arguments, layouts
        self._mesh, self._recording = mesh, recording
        self._output_placements = output_placements
        self._captured = _ConstantCapture(mesh)
        self._tensors = [leaf for each in arguments for leaf in each.leaves if leaf.is_tensor]
        self._device = torch.device(mesh.device_type)
        self.results: tuple[list[Any], Any]
        """The leaves of the results of `fn`, with `TENSOR_RESULT` for tensors, and their tree."""

    def trace(self) -> fx.GraphModule:
        """Record the graph, clean it up and annotate its nodes."""
        module = record_graph(
            self._run_on_shards, self._empty_shards(_META), self._recording, is_training=True
        )
        if any(map(is_random, module.graph.nodes)):
            examples = [
                pytree.tree_unflatten([leaf.value for leaf in each.leaves], each.structure)
                for each in self._arguments
            ]
            match_draws(module, find_draws_of_function(self._fn, examples), "fn")
        self._captured.insert_into(module, self._device)
        for node, value in find_constants(module, "fn").items():
            setattr(module, str(node.target), value.to(self._device))
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        for leaf, node in zip(self._tensors, placeholders, strict=True):
            rename_node(node, leaf.name.replace(".", "_"))
            node.target = node.name
            set_annotation(node, NAME, leaf.name)
        clean(module.graph, self._device)
        self._propagate(module)
        simplify(module.graph)
        used = {node.target for node in module.graph.nodes if node.op == "get_attr"}
        for name in [name for name, _ in module.named_buffers() if name not in used]:
            delattr(module, name)
        module.recompile()
        return module

    def _empty_shards(self, device: torch.device) -> list[torch.Tensor]:
        """Return empty tensors like the local shards of all tensors of the arguments."""
        with world.use(self._recording):
            return [
                torch.empty(
                    self._layouts[leaf.name].local_shape(), dtype=leaf.value.dtype, device=device
                )
                for leaf in self._tensors
            ]

    def _run_on_shards(self, *given: torch.Tensor) -> list[torch.Tensor]:
        """Call `fn` with DTensors of these local shards; return the shards of its results."""
        shards = iter(given)
        trees = []
        for argument in self._arguments:
            leaves = [
                self._as_dtensor(leaf, next(shards)) if leaf.is_tensor else leaf.value
                for leaf in argument.leaves
            ]
            trees.append(pytree.tree_unflatten(leaves, argument.structure))
        with self._captured:
            result = self._fn(*trees)
        return self._shard_results(result)

    def _as_dtensor(self, leaf: StepLeaf, local: torch.Tensor) -> DTensor:
        made = as_recorded_dtensor(local, self._layouts[leaf.name])
        if leaf.value.requires_grad:
            made.requires_grad_()
        return made

    def _shard_results(self, result: Any) -> list[torch.Tensor]:
        """Return the local shards of all tensors that `fn` returned; set `results`."""
        if not isinstance(result, tuple) or len(result) != 2:
            raise ExportError(
                f"fn: expected it to return (new_state, outputs), got {type(result).__name__}"
            )
        state, outputs = result
        shards: list[torch.Tensor] = []
        leaves: list[Any] = []
        first = self._arguments[0]
        new_values = first.flatten(state, "fn: the new state that it returns")
        for leaf, value in zip(first.leaves, new_values, strict=True):
            if leaf.is_tensor:
                _check_new_state(leaf, value)
                shards.append(self._as_shard(value, self._layouts[leaf.name], leaf.name))
            leaves.append(TENSOR_RESULT if leaf.is_tensor else value)
        others = pytree.tree_leaves(outputs)
        tensors = [value for value in others if isinstance(value, torch.Tensor)]
        wanted = iter(as_output_placements(self._output_placements, tensors, self._mesh))
        for value in others:
            if isinstance(value, torch.Tensor):
                layout = Layout.from_placements(self._mesh, value.shape, next(wanted))
                shards.append(self._as_shard(value, layout, "outputs"))
                value = TENSOR_RESULT
            leaves.append(value)
        self.results = leaves, pytree.tree_structure((state, outputs))
        return shards

    def _as_shard(self, value: torch.Tensor, layout: Layout, name: str) -> torch.Tensor:
        value = self._captured.replace(value)
        if not isinstance(value, DTensor):  # all ranks have computed the same
            value = as_recorded_dtensor(value, Layout(self._mesh, value.shape))
        with torch.no_grad(), trace_scope(Cause(name)):
            if value._layout is layout:
                return unwrap(value)
            return as_local_shard(value, layout)

    def _propagate(self, module: fx.GraphModule) -> None:
        """Give every node its value without data, and finish the annotations."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            inputs = self._empty_shards(self._device)
        propagate_values(module, mode, inputs)
        for node in module.graph.nodes:
            node.meta.pop("tensor_meta", None)
        with world.use(self._recording):
            finish_annotations(module.graph, self._mesh)


def _check_new_state(leaf: StepLeaf, value: Any) -> None:
    """Raise ExportError for a new value of the state with another shape or dtype."""
    is_tensor = isinstance(value, torch.Tensor)
    with without_torch_function():  # the example is no part of the step
        wanted = tuple(leaf.value.shape), leaf.value.dtype
    got = (tuple(value.shape), value.dtype) if is_tensor else repr(value)
    if got != wanted:
        raise ExportError(
            f"fn: expected {leaf.name} of the new state to be as it was, {wanted}; it returned "
            f"{got}. The next step needs a state of the same shapes"
        )


# ---- tensors and devices from outside of the step

_FROM_DATA = {"tensor", "as_tensor", "asarray", "from_numpy", "scalar_tensor"}
"""Functions of torch that make a tensor from numbers, which is then a constant."""

_TO_NUMBERS = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
}
"""Functions that return the values of a tensor."""


class _ConstantCapture(TorchFunctionMode):
    """Replaces tensors with data by replicated DTensors of meta tensors, and devices by "meta".

    A step function runs on DTensors of meta tensors. A tensor that it takes from elsewhere, such as
    a buffer of a module, is replaced while it runs, and `insert_into` makes it a constant of the
    graph.

    Arguments:
        mesh: the mesh of the DTensors.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh = mesh
        self._made: dict[int, tuple[torch.Tensor, DTensor]] = {}
        self._nodes: list[tuple[fx.Node, torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function with tensors from outside and devices replaced."""
        if torch.is_autocast_enabled(self._mesh.device_type):
            raise ExportError(
                "fn: torch.autocast does nothing to tensors without data, so it cannot be "
                "recorded; convert parameters and inputs with to(dtype) in fn"
            )
        kwargs = kwargs or {}
        if any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values())):
            raise ExportError(
                f"fn: {getattr(func, '__name__', func)} draws from a torch.Generator, which a "
                "graph cannot hold; draw from torch's default one, without `generator`"
            )
        name = getattr(func, "__name__", "")
        is_constant = name in _FROM_DATA and not isinstance(args[0], torch.Tensor)
        if is_constant or (func in _TO_NUMBERS and _has_data(args[0])):
            with disable_proxy_modes_tracing():
                return func(*args, **_on_cpu(kwargs))
        if func in _TO_NUMBERS:
            raise ExportError(
                f"fn: expected the same operators whatever the values, but it asks for the value "
                f"of a tensor ({func.__name__}); return the tensor, or use torch.where"
            )
        if func is torch.Tensor.to:
            args = tuple(_META if isinstance(each, str) else each for each in args)
        if isinstance(kwargs.get("device"), str | int):
            kwargs = kwargs | {"device": _META}
        args, kwargs = pytree.tree_map(self.replace, (args, kwargs))
        with torch.device(_META):
            result = func(*args, **kwargs)
        pytree.tree_map_only(torch.Tensor, _annotate, result)
        return result

    def replace(self, value: Any) -> Any:
        """Return the stand-in of a tensor with data or of a device; other values as they are."""
        if isinstance(value, torch.device):
            return _META
        return self._stand_in(value) if _has_data(value) else value

    def _stand_in(self, tensor: torch.Tensor) -> DTensor:
        if tensor.requires_grad:
            raise ExportError(
                f"fn: expected all that is trained in the state, but it uses a tensor of shape "
                f"{tuple(tensor.shape)} that requires grad from elsewhere; pass it with the state "
                "(torch.func.functional_call), or detach() it if it is a constant"
            )
        if id(tensor) not in self._made:
            local = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META
            )
            node = node_of(local)
            assert node is not None, "it is recorded"
            self._nodes.append((node, tensor))
            self._made[id(tensor)] = tensor, wrap(local, Layout(self._mesh, tensor.shape))
        return self._made[id(tensor)][1]

    def insert_into(self, module: fx.GraphModule, device: torch.device) -> None:
        """Put the replaced tensors into the graph, as buffers of the module."""
        for tensor, stand_in in self._made.values():
            if version_of(stand_in):
                raise ExportError(
                    f"fn: it writes to a tensor of shape {tuple(tensor.shape)} from elsewhere, "
                    "such as a buffer of a module; pass it with the state "
                    "(torch.func.functional_call takes buffers too), and return it"
                )
        for at, (node, tensor) in enumerate(self._nodes):
            name = f"constant_{at}"
            module.register_buffer(name, tensor.detach().to(device))
            with module.graph.inserting_before(node):
                constant = module.graph.get_attr(name)
            constant.meta = node.meta
            node.replace_all_uses_with(constant)
            module.graph.erase_node(node)


def _annotate(tensor: torch.Tensor) -> None:
    """Write the layout and the module of a tensor at its node."""
    annotate_tensor(tensor)
    node = node_of(tensor)
    if node is not None and current_cause().module:
        set_annotation(node, MODULE, current_cause().module)


def _has_data(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and not value.is_meta


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Replace a device by the CPU: a constant needs data, and the device may be "meta"."""
    return kwargs | {"device": "cpu"} if "device" in kwargs else kwargs
