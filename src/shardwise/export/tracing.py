"""Run a graph on DTensors without data, as one rank would, and write down what happens locally.

The DTensors leave no trace: what is recorded are the local operators and the collectives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import fx
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx

from shardwise import world
from shardwise.comm import Cause, trace
from shardwise.comm.trace import acting
from shardwise.copies import as_ordinary, copies_in
from shardwise.dispatch.entry import check_writable
from shardwise.dispatch.moving import input_move, moved
from shardwise.dispatch.state import state
from shardwise.export.aliases import seen_by
from shardwise.export.assigning import UNREAD, assign, is_assigned_to
from shardwise.export.autocast import Autocast
from shardwise.export.modules import innermost
from shardwise.export.notes import node_of, note, note_layout
from shardwise.export.operators import check_operator, data_refused, first_alone, needs_data
from shardwise.layout import Layout
from shardwise.tensor import DTensor, unwrap, wrap
from shardwise.torch_internals import (
    FakeTensorMode,
    TracingContext,
    as_local,
    current_node,
    pytree,
    tracing,
)
from shardwise.world import World

_META = torch.device("meta")


class Moves(Protocol):
    """What may move tensors on their way from node to node."""

    def entering(self, node: fx.Node, source: fx.Node, value: Any) -> Any:
        """What a node gets in place of the value of another."""

    def leaving(self, node: fx.Node, value: Any) -> Any:
        """What others get in place of a node's result."""


class OnDTensors(fx.Interpreter):
    """Runs a graph on DTensors of meta tensors, and notes at each recorded node how it lies.

    Arguments:
        module: the graph.
        moves: what may move arguments and results of its nodes.
        autocast: within which it is.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        moves: Moves | None = None,
        autocast: Autocast | None = None,
    ) -> None:
        super().__init__(module, garbage_collect_values=False)  # they have no data
        self._moves, self._autocast = moves, autocast

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; its recorded ones get its metadata and layout."""
        with acting(Cause(module=innermost(n) or "")):
            try:
                result = self._result(n)
            except Exception as error:
                if not needs_data(error):
                    error.add_note(f"[in node {n.name} of the program, {_place_of(n)}]")
                    raise
                result = self._on_whole(n, error)
            if self._moves is not None:
                result = self._moves.leaving(n, result)
        pytree.tree_map_only(torch.Tensor, note, result)
        return result

    def _result(self, node: fx.Node) -> Any:
        if is_assigned_to(node):
            return UNREAD
        if node.args and isinstance(node.args[0], fx.Node) and self.env[node.args[0]] is UNREAD:
            return assign(node, self.env, self.fetch_args_kwargs_from_env(node)[0][1])
        alone = first_alone(node)
        if alone is None:
            return super().run_node(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        with current_node(self, node):
            return (alone(*args, **kwargs),)

    def _on_whole(self, node: fx.Node, error: Exception) -> Any:
        """Run an operator whose rule asks for numbers as every rank does it alike, if it can be."""
        values = [self.env[each] for each in node.all_input_nodes]
        pieces = [each for each in values if isinstance(each, DTensor)]
        if not pieces or not all(each._layout.is_replicated for each in pieces):
            refused = data_refused(node, values)
            refused.add_note(f"[in node {node.name} of the program, {_place_of(node)}]")
            raise refused from error
        mesh = pieces[0]._layout.mesh
        given = self.fetch_args_kwargs_from_env(node)
        for source in seen_by(node)[1]:
            check_writable(str(node.target), self.env[source])

        def run() -> Any:
            args, kwargs = pytree.tree_map_only(DTensor, unwrap, given)
            result = self.call_function(node.target, args, kwargs)
            return pytree.tree_map_only(
                torch.Tensor, lambda each: wrap(each, Layout(mesh, each.shape)), result
            )

        return as_ordinary(copies_in(*given), run)

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        """What a node is run on."""
        moves = self._moves
        if moves is None:
            return super().map_nodes_to_values(args, n)
        return fx.node.map_arg(args, lambda source: moves.entering(n, source, self.env[source]))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator; what it would put on a device stays without data."""
        if target in _INLINE:
            return _INLINE[target](self, *args, **kwargs)
        check_operator(target, args, kwargs)
        if self._autocast is not None:
            args, kwargs = self._autocast.cast(target, args, kwargs)
        args, kwargs = pytree.tree_map_only(torch.device, lambda _: _META, (args, kwargs))
        if target is torch.ops.aten.sym_size.int:
            tensor, dim = args
            return tensor.shape[dim]
        return super().call_function(target, args, kwargs)


def _with_grad_mode(interpreter: OnDTensors, enabled: Any, graph: Any, *args: Any) -> Any:
    """A block within `no_grad`: nothing is differentiated here."""
    return OnDTensors(graph, interpreter._moves, interpreter._autocast).run(*args)


def _with_autocast(
    interpreter: OnDTensors,
    device: Any,
    dtype: Any,
    enabled: Any,
    cache: Any,
    graph: Any,
    *args: Any,
) -> Any:
    autocast = Autocast(device, dtype) if enabled else None
    return OnDTensors(graph, interpreter._moves, autocast).run(*args)


_INLINE: dict[Any, Callable[..., Any]] = {
    torch.ops.higher_order.wrap_with_set_grad_enabled: _with_grad_mode,
    torch.ops.higher_order.wrap_with_autocast: _with_autocast,
    # What export has seen of a tensor before a cast: it would be made whole for that.
    torch.ops.aten._assert_tensor_metadata.default: lambda *args, **kwargs: None,
}


def _place_of(node: fx.Node) -> str:
    path = innermost(node)
    return f"module {path}" if path else "no module"


# ---- recording


def record(
    function: Callable[..., Any], inputs: Sequence[Any], here: World, *, is_training: bool = False
) -> fx.GraphModule:
    """The graph of what a function of plain tensors does, as the rank of this world.

    On a thread of its own: what a thread remembers of calls is of one rank.

    Arguments:
        inputs: meta tensors, or what is no tensor and stays as it is.
        is_training: whether it differentiates: then what the gradients need is recorded too, and
            the operators are those that autograd calls.
    """
    results: list[Any] = []
    mode = torch.enable_grad if is_training else torch.no_grad

    def heard(*given: Any) -> Any:
        # Collectives know what they are for while somebody listens. From within make_fx, which
        # puts its own call of modules in place of the one that says where it is.
        with trace.listen(lambda event: None):
            return function(*given)

    def run() -> None:
        try:
            # Of this thread only. A gradient has moves of its own, as autograd calls them.
            state.keeps_gathers = not is_training
            with world.use(here), mode(), _traceable(), _noting():
                traced = make_fx(heard, tracing_mode="real", pre_dispatch=not is_training)
                results.append(traced(*inputs))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, name="record")
    thread.start()
    thread.join()
    (result,) = results
    if isinstance(result, BaseException):
        raise result
    return result  # type: ignore[no-any-return]


def without_writes(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """The same graph, with results in place of writes, as decomposed programs have it."""

    def run(*given: Any) -> Any:
        return fx.Interpreter(module).run(*given)

    with torch.no_grad(), _noting():
        functional = torch.func.functionalize(run, remove="mutations")
        return make_fx(functional, tracing_mode="real")(*inputs)


@contextmanager
def _noting() -> Iterator[None]:
    """Nodes get the metadata of those that are run."""
    # make_fx makes a FakeTensorMode of its own for each node if none is about, which is half of
    # the time of a recording.
    context = TracingContext(FakeTensorMode())
    with tracing(context), fx_traceback.preserve_node_meta():
        yield


_tracing = threading.Lock()
_count = 0


@contextmanager
def _traceable() -> Iterator[None]:
    """While anybody records, aliases of DTensors are made by an operator that can be recorded."""
    global _count
    with _tracing:
        _count += 1
        DTensor.as_subclass = _alias  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        with _tracing:
            _count -= 1
            if not _count:
                del DTensor.as_subclass


def _alias(tensor: torch.Tensor, kind: type) -> torch.Tensor:
    with as_local():
        if kind is torch.Tensor:
            return torch.ops.aten.alias.default(tensor)  # type: ignore[no-any-return]
        return torch.Tensor.as_subclass(tensor, kind)


def as_dtensor(local: torch.Tensor, layout: Layout) -> DTensor:
    """An input that is being recorded, as a piece of a DTensor."""
    made = wrap(torch.ops.aten.alias.default(local), layout)
    note(made)
    return made


def as_piece(tensor: DTensor, layout: Layout) -> torch.Tensor:
    """A result that is being recorded, as a rank has it in a layout."""
    tensor._renew()
    with as_local():  # as an operator would: it may have been moved there before
        there = moved(tensor, input_move(tensor._layout, layout, ()), "output")
    piece = unwrap(there) if isinstance(there, DTensor) else there
    note_layout(node_of(piece), layout)
    return piece
