"""shard_step: a training step, forward, backward and optimizer, as one graph of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from shardwise import world
from shardwise.comm import Cause
from shardwise.comm.trace import acting
from shardwise.export import cleaning, draws, notes
from shardwise.export.errors import ExportError
from shardwise.export.leaves import Argument, Leaf, arguments_of, placements_by_leaf
from shardwise.export.outside import Outside
from shardwise.export.plan import output_placements_of
from shardwise.export.recording import RecordingWorld, as_recorded
from shardwise.export.simplifying import simplify
from shardwise.export.tracing import as_dtensor, as_piece, record
from shardwise.export.values import constants_of, propagate
from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh, as_mesh
from shardwise.tensor import DTensor, unwrap
from shardwise.torch_internals import FakeTensorMode, pytree, rename_node, without_torch_function

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

StepFunction = Callable[..., tuple[Any, Any]]


def shard_step(
    fn: StepFunction,
    mesh: DeviceMesh | TorchMesh,
    plan: Mapping[str, Any],
    example: Sequence[Any],
    *,
    output_placements: Any = None,
) -> ShardedStep:
    """A training step of one process as one graph of the calling rank's operators and collectives.

    `fn(state, *batch) -> (new_state, outputs)` is ordinary PyTorch that returns what it changes:
    it computes a loss, say with `torch.func.functional_call`, differentiates it with
    `torch.autograd.grad`, and returns new parameters and a new optimizer state. Arguments and
    results are any pytrees. What is no tensor in them is a constant of the graph, as are tensors
    that `fn` takes from elsewhere, such as buffers of a module.

    Arguments:
        mesh: the ranks that will run it. On an abstract mesh, the step of its first rank.
        plan: placements by patterns of names. A tensor of the state is named by its keys in it
            (`params.layers.0.weight`), one of the batch by the argument's name and its keys
            (`batch.tokens`). What no pattern matches is whole on every rank; but what the state
            keeps of a parameter elsewhere, with its name and shape (`adam.mean.layers.0.weight`),
            lies as the parameter does.
        example: the arguments of `fn`, the state first; only their shapes, dtypes and whether they
            require grad count, so tensors may be meta tensors. Sizes are fixed by them.
        output_placements: of the tensors in `outputs`, in order, or one for all; whole by default.

    Returns:
        A `ShardedStep`, which is called with this rank's pieces.

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
    real, here = as_recorded(mesh)
    arguments = arguments_of(fn, example)
    placements = placements_by_leaf(
        [leaf for each in arguments for leaf in each.leaves], mesh, plan
    )
    with world.use(here):
        layouts = {
            leaf.name: Layout.from_placements(real, leaf.value.shape, placements[leaf.name])
            for argument in arguments
            for leaf in argument.leaves
            if leaf.is_tensor
        }
    recording = _Recording(fn, arguments, layouts, real, here, output_placements)
    module = recording.module()
    return ShardedStep(module, mesh, here, arguments, layouts, recording.results)


class ShardedStep:
    """One rank's training step: `new_state, outputs = step(state, *batch)`, all local pieces.

    `shard_step` makes it.
    """

    graph_module: fx.GraphModule
    """The graph: tensors of the arguments in, in order; those of the new state and outputs out."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        mesh: DeviceMesh,
        here: RecordingWorld,
        arguments: Sequence[Argument],
        layouts: Mapping[str, Layout],
        results: tuple[list[Any], Any],
    ) -> None:
        self.graph_module = graph_module
        self._run: Callable[..., Any] = graph_module
        self._mesh, self._here, self._arguments = mesh, here, arguments
        self._layouts = dict(layouts)
        self._shapes = {name: self._shape(layout) for name, layout in layouts.items()}
        self._results = results

    def _shape(self, layout: Layout) -> tuple[int, ...]:
        with world.use(self._here):
            return layout.local_shape()

    @property
    def layouts(self) -> dict[str, Layout]:
        """How the tensors of the arguments lie, by name."""
        return dict(self._layouts)

    def __call__(self, *args: Any) -> tuple[Any, Any]:
        """Run the step on this rank's pieces.

        Returns:
            The new state, which lies as the state does, and the outputs.
        """
        if len(args) != len(self._arguments):
            names = [argument.name for argument in self._arguments]
            raise ExportError(f"expected the arguments {names}, got {len(args)}")
        given: list[torch.Tensor] = []
        for argument, tree in zip(self._arguments, args, strict=True):
            for leaf, value in zip(argument.leaves, argument.flat(tree), strict=True):
                self._check(leaf, value)
                if leaf.is_tensor:
                    given.append(value)
        with torch.no_grad():
            tensors = iter(self._run(*given))
        leaves, structure = self._results
        filled = [next(tensors) if leaf is _TENSOR else leaf for leaf in leaves]
        result: tuple[Any, Any] = pytree.tree_unflatten(filled, structure)
        return result

    def compile(self, **options: Any) -> None:
        """Run it compiled from now on; `options` are those of `torch.compile`."""
        self._run = torch.compile(self.graph_module, **options)

    def shard(self, tree: Any, argument: str | int = 0) -> Any:
        """This rank's pieces, as new tensors, of a whole argument: the state, or that named."""

        def piece(leaf: Leaf, value: Any) -> Any:
            layout = self._layouts[leaf.name]
            if tuple(value.shape) != layout.shape:
                raise ExportError(
                    f"{leaf.name}: expected the whole tensor, {layout.shape}, "
                    f"got {tuple(value.shape)}"
                )
            with world.use(self._here), torch.no_grad():
                local = layout.piece_of(value.detach())
                return local.clone(memory_format=torch.contiguous_format)

        return self._mapped(piece, tree, argument)

    def unshard(self, tree: Any, argument: str | int = 0) -> Any:
        """The whole tensors, on every rank, as new ones, of this rank's pieces of an argument; all
        ranks call it."""

        def whole(leaf: Leaf, value: Any) -> Any:
            self._check(leaf, value)
            layout = self._layouts[leaf.name]
            shape, placements = layout.shape, layout.placements
            tensor = DTensor.from_local(value.detach(), self._mesh, placements, shape=shape)
            full = tensor.full_tensor()
            return full.clone() if layout.is_replicated else full  # a step may write in place

        return self._mapped(whole, tree, argument)

    def _mapped(self, change: Callable[[Leaf, Any], Any], tree: Any, argument: str | int) -> Any:
        names = [each.name for each in self._arguments]
        if argument not in names and argument not in range(len(names)):
            raise ExportError(f"argument: expected one of {names}, or its place; got {argument!r}")
        at = argument if isinstance(argument, int) else names.index(argument)
        found = self._arguments[at]
        leaves = [
            change(leaf, value) if leaf.is_tensor else value
            for leaf, value in zip(found.leaves, found.flat(tree), strict=True)
        ]
        return pytree.tree_unflatten(leaves, found.structure)

    def _check(self, leaf: Leaf, value: Any) -> None:
        """Refuse what the graph was not made for."""
        if not leaf.is_tensor:
            if type(value) is not type(leaf.value) or value != leaf.value:
                raise ExportError(
                    f"{leaf.name}: expected {leaf.value!r}, as what is no tensor is a constant of "
                    f"the step; got {value!r}. Pass a tensor for a number that changes"
                )
            return
        shape = self._shapes[leaf.name]
        if not isinstance(value, torch.Tensor) or value.shape != shape:
            got = tuple(value.shape) if isinstance(value, torch.Tensor) else repr(value)
            raise ExportError(
                f"{leaf.name}: expected this rank's piece, {shape}, of "
                f"{self._layouts[leaf.name]!r}; got {got}. shard(...) makes pieces"
            )
        if value.dtype != leaf.value.dtype:
            raise ExportError(f"{leaf.name}: expected {leaf.value.dtype}, got {value.dtype}")


class _Tensor:
    """Stands where a result of the graph is put."""


_TENSOR = _Tensor()


class _Recording:
    """The making of a step's graph."""

    def __init__(
        self,
        fn: StepFunction,
        arguments: Sequence[Argument],
        layouts: Mapping[str, Layout],
        mesh: DeviceMesh,
        here: RecordingWorld,
        output_placements: Any,
    ) -> None:
        self._fn, self._arguments, self._layouts = fn, arguments, layouts
        self._mesh, self._here, self._output_placements = mesh, here, output_placements
        self._outside = Outside(mesh)
        self._tensors = [leaf for each in arguments for leaf in each.leaves if leaf.is_tensor]
        self._device = torch.device(mesh.device_type)
        self.results: tuple[list[Any], Any]
        """The leaves of what `fn` returns, with `_TENSOR` for tensors, and their tree."""

    def module(self) -> fx.GraphModule:
        """Record, clean up, and write down what each node is."""
        with world.use(self._here):
            inputs = [
                torch.empty(
                    self._layouts[leaf.name].local_shape(), dtype=leaf.value.dtype, device="meta"
                )
                for leaf in self._tensors
            ]
        module = record(self._on_pieces, inputs, self._here, is_training=True)
        if any(map(cleaning.is_random, module.graph.nodes)):
            examples = [
                pytree.tree_unflatten([leaf.value for leaf in each.leaves], each.structure)
                for each in self._arguments
            ]
            draws.settle(module, draws.of_function(self._fn, examples), "fn")
        self._outside.insert(module, self._device)
        for node, value in constants_of(module, "fn").items():
            setattr(module, str(node.target), value.to(self._device))
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        for leaf, node in zip(self._tensors, placeholders, strict=True):
            rename_node(node, leaf.name.replace(".", "_"))
            node.target = node.name
            notes.say(node, notes.NAME, leaf.name)
        cleaning.clean(module.graph, self._device)
        self._propagate(module)
        simplify(module.graph)
        used = {node.target for node in module.graph.nodes if node.op == "get_attr"}
        for name in [name for name, _ in module.named_buffers() if name not in used]:
            delattr(module, name)
        module.recompile()
        return module

    def _on_pieces(self, *given: torch.Tensor) -> list[torch.Tensor]:
        """`fn` on DTensors of which these are the pieces, and the pieces of its results."""
        pieces = iter(given)
        trees = []
        for argument in self._arguments:
            leaves = [
                self._dtensor(leaf, next(pieces)) if leaf.is_tensor else leaf.value
                for leaf in argument.leaves
            ]
            trees.append(pytree.tree_unflatten(leaves, argument.structure))
        with self._outside:
            result = self._fn(*trees)
        return self._pieces_of(result)

    def _dtensor(self, leaf: Leaf, piece: torch.Tensor) -> DTensor:
        made = as_dtensor(piece, self._layouts[leaf.name])
        if leaf.value.requires_grad:
            made.requires_grad_()
        return made

    def _pieces_of(self, result: Any) -> list[torch.Tensor]:
        if not isinstance(result, tuple) or len(result) != 2:
            raise ExportError(
                f"fn: expected it to return (new_state, outputs), got {type(result).__name__}"
            )
        state, outputs = result
        pieces: list[torch.Tensor] = []
        kept: list[Any] = []
        first = self._arguments[0]
        leaves = first.flat(state, "fn: the new state that it returns")
        for leaf, value in zip(first.leaves, leaves, strict=True):
            if leaf.is_tensor:
                _check_returned(leaf, value)
                pieces.append(self._piece(value, self._layouts[leaf.name], leaf.name))
            kept.append(_TENSOR if leaf.is_tensor else value)
        others = pytree.tree_leaves(outputs)
        tensors = [value for value in others if isinstance(value, torch.Tensor)]
        wanted = iter(output_placements_of(self._output_placements, tensors, self._mesh))
        for value in others:
            if isinstance(value, torch.Tensor):
                layout = Layout.from_placements(self._mesh, value.shape, next(wanted))
                pieces.append(self._piece(value, layout, "outputs"))
                value = _TENSOR
            kept.append(value)
        self.results = kept, pytree.tree_structure((state, outputs))
        return pieces

    def _piece(self, value: torch.Tensor, layout: Layout, name: str) -> torch.Tensor:
        value = self._outside.inside(value)
        if not isinstance(value, DTensor):  # made alike by all ranks
            value = as_dtensor(value, Layout(self._mesh, value.shape))
        with torch.no_grad(), acting(Cause(name)):
            if value._layout is layout:
                return unwrap(value)
            return as_piece(value, layout)

    def _propagate(self, module: fx.GraphModule) -> None:
        """Give every node its value without data."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with world.use(self._here), mode:
            inputs = [
                torch.empty(
                    self._layouts[leaf.name].local_shape(),
                    dtype=leaf.value.dtype,
                    device=self._device,
                )
                for leaf in self._tensors
            ]
        propagate(module, mode, inputs)
        for node in module.graph.nodes:
            node.meta.pop("tensor_meta", None)
        with world.use(self._here):
            notes.finish(module.graph, self._mesh)


def _check_returned(leaf: Leaf, value: Any) -> None:
    is_tensor = isinstance(value, torch.Tensor)
    with without_torch_function():  # the example is no part of the step
        wanted = tuple(leaf.value.shape), leaf.value.dtype
    got = (tuple(value.shape), value.dtype) if is_tensor else repr(value)
    if got != wanted:
        raise ExportError(
            f"fn: expected {leaf.name} of the new state to be as it was, {wanted}; it returned "
            f"{got}. A state that changes its shape cannot go in again"
        )
