"""shard_step: a training step, forward, backward and optimizer, as one graph of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from shardwise.core import world
from shardwise.core.errors import ExportError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh, as_mesh
from shardwise.dtensor.tensor import DTensor
from shardwise.export.placements import (
    StepArgument,
    StepLeaf,
    name_arguments,
    placements_by_leaf,
)
from shardwise.export.recording import RecordingWorld, as_recorded
from shardwise.export.step_tracing import TENSOR_RESULT, StepFunction, StepTracer
from shardwise.torch_internals import pytree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh


def shard_step(
    fn: StepFunction,
    mesh: DeviceMesh | TorchMesh,
    plan: Mapping[str, Any],
    example: Sequence[Any],
    *,
    output_placements: Any = None,
) -> ShardedStep:
    """Return a training step as one graph: the calling rank's operators and collectives.

    `fn(state, *batch) -> (new_state, outputs)` is ordinary PyTorch for one process that returns
    what it changes: it computes a loss, say with `torch.func.functional_call`, differentiates it
    with `torch.autograd.grad`, and returns new parameters and a new optimizer state. Arguments and
    results are any pytrees. Leaves that are not tensors are constants of the graph, and so are
    tensors that `fn` takes from elsewhere, such as buffers of a module.

    Arguments:
        fn: the step function.
        mesh: the ranks that will run it. For an abstract mesh, its first rank's step is returned.
        plan: placements by patterns of names. A tensor of the state is named by its keys in it
            (`params.layers.0.weight`), one of the batch by the argument's name and its keys
            (`batch.tokens`). Without a match a tensor is replicated, except for optimizer state: a
            tensor elsewhere in the state with the name and shape of a parameter
            (`adam.mean.layers.0.weight`) gets the placements of the parameter.
        example: the arguments of `fn`, the state first. Only shapes, dtypes and `requires_grad` of
            its tensors count, so they may be meta tensors. They fix the sizes of the step.
        output_placements: placements of the tensors in `outputs`, in order, or one for all;
            replicated by default.

    Returns:
        A `ShardedStep`, to be called with this rank's local shards.

    Example:
        >>> def fn(params, tokens, targets):
        ...     params = {name: each.detach().requires_grad_() for name, each in params.items()}
        ...     loss = loss_of(functional_call(model, params, (tokens,)), targets)
        ...     gradients = torch.autograd.grad(loss, list(params.values()))
        ...     pairs = zip(params.items(), gradients)
        ...     return {name: p.detach() - 0.1 * g for (name, p), g in pairs}, loss.detach()
        >>> params = dict(model.named_parameters())
        >>> step = shard_step(fn, mesh, {"up.weight": [Shard(0)]}, (params, tokens, targets))
        >>> pieces = step.shard(params)
        >>> pieces, loss = step(pieces, tokens, targets)
    """
    mesh = as_mesh(mesh)
    recorded_mesh, recording = as_recorded(mesh)
    arguments = name_arguments(fn, example)
    placements = placements_by_leaf(
        [leaf for each in arguments for leaf in each.leaves], mesh, plan
    )
    with world.use(recording):
        layouts = {
            leaf.name: Layout.from_placements(
                recorded_mesh, leaf.value.shape, placements[leaf.name]
            )
            for argument in arguments
            for leaf in argument.leaves
            if leaf.is_tensor
        }
    tracer = StepTracer(fn, arguments, layouts, recorded_mesh, recording, output_placements)
    module = tracer.trace()
    return ShardedStep(module, mesh, recording, arguments, layouts, tracer.results)


class ShardedStep:
    """One rank's training step: `new_state, outputs = step(state, *batch)`, all of local shards.

    `shard_step` makes it.
    """

    graph_module: fx.GraphModule
    """The graph: from the tensors of the arguments, in order, to those of new state and outputs."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        mesh: DeviceMesh,
        here: RecordingWorld,
        arguments: Sequence[StepArgument],
        layouts: Mapping[str, Layout],
        results: tuple[list[Any], Any],
    ) -> None:
        self.graph_module = graph_module
        self._run: Callable[..., Any] = graph_module
        self._mesh, self._recording, self._arguments = mesh, here, arguments
        self._layouts = dict(layouts)
        with world.use(here):
            self._local_shapes = {name: layout.local_shape() for name, layout in layouts.items()}
        self._results = results

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layouts of the tensors of the arguments, by name."""
        return dict(self._layouts)

    def __call__(self, *args: Any) -> tuple[Any, Any]:
        """Run the step on this rank's local shards.

        Returns:
            The new state, with the layouts of the state, and the outputs.
        """
        if len(args) != len(self._arguments):
            names = [argument.name for argument in self._arguments]
            raise ExportError(f"expected the arguments {names}, got {len(args)}")
        given: list[torch.Tensor] = []
        for argument, tree in zip(self._arguments, args, strict=True):
            for leaf, value in zip(argument.leaves, argument.flatten(tree), strict=True):
                self._check(leaf, value)
                if leaf.is_tensor:
                    given.append(value)
        with torch.no_grad():
            tensors = iter(self._run(*given))
        leaves, structure = self._results
        filled = [next(tensors) if leaf is TENSOR_RESULT else leaf for leaf in leaves]
        result: tuple[Any, Any] = pytree.tree_unflatten(filled, structure)
        return result

    def compile(self, **options: Any) -> None:
        """Compile the graph for all later calls; `options` are those of `torch.compile`."""
        self._run = torch.compile(self.graph_module, **options)

    def shard(self, tree: Any, argument: str | int = 0) -> Any:
        """Return this rank's local shards, as new tensors, of a whole argument.

        Arguments:
            tree: the argument, with whole tensors.
            argument: its name or position; the state by default.
        """

        def take_shard(leaf: StepLeaf, value: Any) -> Any:
            layout = self._layouts[leaf.name]
            if tuple(value.shape) != layout.shape:
                raise ExportError(
                    f"{leaf.name}: expected the whole tensor, {layout.shape}, "
                    f"got {tuple(value.shape)}"
                )
            with world.use(self._recording), torch.no_grad():
                local = layout.piece_of(value.detach())
                return local.clone(memory_format=torch.contiguous_format)

        return self._map_tensors(take_shard, tree, argument)

    def unshard(self, tree: Any, argument: str | int = 0) -> Any:
        """Return the whole tensors, as new tensors on every rank, of an argument's local shards.

        All ranks must call it.

        Arguments:
            tree: the argument, with this rank's local shards.
            argument: its name or position; the state by default.
        """

        def gather(leaf: StepLeaf, value: Any) -> Any:
            self._check(leaf, value)
            layout = self._layouts[leaf.name]
            shape, placements = layout.shape, layout.placements
            tensor = DTensor.from_local(value.detach(), self._mesh, placements, shape=shape)
            full = tensor.full_tensor()
            # A copy, as a step may write to its arguments in place.
            return full.clone() if layout.is_replicated else full

        return self._map_tensors(gather, tree, argument)

    def _map_tensors(
        self, change: Callable[[StepLeaf, Any], Any], tree: Any, argument: str | int
    ) -> Any:
        names = [each.name for each in self._arguments]
        if argument not in names and argument not in range(len(names)):
            raise ExportError(f"argument: expected one of {names}, or its place; got {argument!r}")
        at = argument if isinstance(argument, int) else names.index(argument)
        found = self._arguments[at]
        leaves = [
            change(leaf, value) if leaf.is_tensor else value
            for leaf, value in zip(found.leaves, found.flatten(tree), strict=True)
        ]
        return pytree.tree_unflatten(leaves, found.structure)

    def _check(self, leaf: StepLeaf, value: Any) -> None:
        """Raise ExportError for a leaf that differs from the one the graph was made for."""
        if not leaf.is_tensor:
            if type(value) is not type(leaf.value) or value != leaf.value:
                raise ExportError(
                    f"{leaf.name}: expected {leaf.value!r}, as values that are no tensors are "
                    f"constants of the step; got {value!r}. Pass a tensor for a number that changes"
                )
            return
        shape = self._local_shapes[leaf.name]
        if not isinstance(value, torch.Tensor) or value.shape != shape:
            got = tuple(value.shape) if isinstance(value, torch.Tensor) else repr(value)
            raise ExportError(
                f"{leaf.name}: expected this rank's piece, {shape}, of "
                f"{self._layouts[leaf.name]!r}; got {got}. shard(...) makes pieces"
            )
        if value.dtype != leaf.value.dtype:
            raise ExportError(f"{leaf.name}: expected {leaf.value.dtype}, got {value.dtype}")
