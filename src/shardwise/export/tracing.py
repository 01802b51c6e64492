"""Run a graph on DTensors without data, as one rank, and record the operators on local tensors.

The recorded graph has the local operators and the collectives, and no DTensors.
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

from shardwise.comm import Cause, trace
from shardwise.comm.trace import trace_scope
from shardwise.core import world
from shardwise.core.layout import Layout
from shardwise.core.world import World
from shardwise.dtensor.input_moves import move_input, plan_input_move
from shardwise.dtensor.state import state
from shardwise.dtensor.tensor import DTensor, unwrap, wrap
from shardwise.dtensor.view_copy import call_with_copies, view_copies_in
from shardwise.dtensor.writes import check_writable
from shardwise.export.annotations import (
    annotate_layout,
    annotate_tensor,
    module_path_of,
    node_of,
)
from shardwise.export.operators import (
    Autocast,
    check_operator,
    data_needed_error,
    first_result_function,
    is_data_error,
    viewed_and_written,
)
from shardwise.torch_internals import (
    FakeTensorMode,
    TensorBase,
    TracingContext,
    as_local,
    current_node,
    pytree,
    tracing,
)

_META = torch.device("meta")
_aten: Any = torch.ops.aten


class ValueMoves(Protocol):
    """Redistributes values between the nodes of a graph while it runs. Both methods may return the
    value as it is."""

    def move_argument(self, node: fx.Node, source: fx.Node, value: Any) -> Any:
        """Return the argument that `node` is run on, given the value of the node `source`."""

    def move_result(self, node: fx.Node, value: Any) -> Any:
        """Return the value that users of a node get, given the result that it computed."""


class DTensorInterpreter(fx.Interpreter):
    """Runs a graph on DTensors of meta tensors, and annotates recorded nodes with layouts.

    Arguments:
        module: the graph.
        moves: redistributes arguments and results of its nodes.
        autocast: the autocast block that the graph is in, if any.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        moves: ValueMoves | None = None,
        autocast: Autocast | None = None,
    ) -> None:
        super().__init__(module, garbage_collect_values=False)  # they have no data
        self._moves, self._autocast = moves, autocast

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; the nodes that it records get its metadata and layout."""
        with trace_scope(Cause(module=module_path_of(n) or "")):
            try:
                result = self._run_node(n)
            except Exception as error:
                if not is_data_error(error):
                    error.add_note(_location(n))
                    raise
                result = self._run_replicated(n, error)
            if self._moves is not None:
                result = self._moves.move_result(n, result)
        pytree.tree_map_only(torch.Tensor, annotate_tensor, result)
        return result

    def _run_node(self, node: fx.Node) -> Any:
        """Run a node; cheaper if it assigns by index, or its first result alone is used."""
        if _is_only_assigned_to(node):
            return _ASSIGNED_VIEW
        if node.args and isinstance(node.args[0], fx.Node):
            view = node.args[0]
            if self.env[view] is _ASSIGNED_VIEW:
                value = self.fetch_args_kwargs_from_env(node)[0][1]
                self.env[view.args[0]][_index_of(view)] = value  # type: ignore[index]
                return None
        first_result = first_result_function(node)
        if first_result is None:
            return super().run_node(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        with current_node(self, node):
            return (first_result(*args, **kwargs),)

    def _run_replicated(self, node: fx.Node, error: Exception) -> Any:
        """Run an operator whose rule needs data on local tensors, if all inputs are replicated."""
        values = [self.env[each] for each in node.all_input_nodes]
        inputs = [each for each in values if isinstance(each, DTensor)]
        if not inputs or not all(each._layout.is_replicated for each in inputs):
            refused = data_needed_error(node, values)
            refused.add_note(_location(node))
            raise refused from error
        mesh = inputs[0]._layout.mesh
        given = self.fetch_args_kwargs_from_env(node)
        for source in viewed_and_written(node)[1]:
            check_writable(str(node.target), self.env[source])

        def run() -> Any:
            args, kwargs = pytree.tree_map_only(DTensor, unwrap, given)
            result = self.call_function(node.target, args, kwargs)
            return pytree.tree_map_only(
                torch.Tensor, lambda each: wrap(each, Layout(mesh, each.shape)), result
            )

        return call_with_copies(view_copies_in(*given), run)

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        """Return the values that a node is run on."""
        moves = self._moves
        if moves is None:
            return super().map_nodes_to_values(args, n)
        return fx.node.map_arg(
            args, lambda source: moves.move_argument(n, source, self.env[source])
        )

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator; a tensor that it would create on a device is a meta tensor."""
        if target in _INLINE:
            return _INLINE[target](self, *args, **kwargs)
        check_operator(target)
        if self._autocast is not None:
            args, kwargs = self._autocast.cast(target, args, kwargs)
        args, kwargs = pytree.tree_map_only(torch.device, lambda _: _META, (args, kwargs))
        if target is _aten.sym_size.int:
            tensor, dim = args
            return tensor.shape[dim]
        return super().call_function(target, args, kwargs)


def _with_grad_mode(interpreter: DTensorInterpreter, enabled: Any, graph: Any, *args: Any) -> Any:
    """Run a block within `no_grad` inline: a program differentiates nothing."""
    return DTensorInterpreter(graph, interpreter._moves, interpreter._autocast).run(*args)


def _with_autocast(
    interpreter: DTensorInterpreter,
    device: Any,
    dtype: Any,
    enabled: Any,
    cache: Any,
    graph: Any,
    *args: Any,
) -> Any:
    """Run a block within `autocast` inline, with its casts."""
    autocast = Autocast(device, dtype) if enabled else None
    return DTensorInterpreter(graph, interpreter._moves, autocast).run(*args)


_INLINE: dict[Any, Callable[..., Any]] = {
    torch.ops.higher_order.wrap_with_set_grad_enabled: _with_grad_mode,
    torch.ops.higher_order.wrap_with_autocast: _with_autocast,
    # Checks the metadata of a tensor before a cast: it would gather the tensor for nothing.
    torch.ops.aten._assert_tensor_metadata.default: lambda *args, **kwargs: None,
}


def _location(node: fx.Node) -> str:
    """Describe the place of a node, for errors."""
    path = module_path_of(node)
    place = f"module {path}" if path else "no module"
    return f"[in node {node.name} of the program, {place}]"


# ---- assignments such as `buffer[2:5] = x`, which export writes as a view and a copy to it. Run as
# such, a view of a split dim would be fetched from other ranks, only to be overwritten.

_ASSIGNED_VIEW = object()
"""Stands for a view that is not computed, as it is only overwritten."""


def _is_only_assigned_to(node: fx.Node) -> bool:
    """Check whether a node is a view whose only use is that a copy overwrites all of it."""
    if _index_of(node) is None or len(node.users) != 1:
        return False
    (user,) = node.users
    is_target = user.target is _aten.copy_.default and user.args[0] is node
    return is_target and user.args[1] is not node and not user.users


def _index_of(node: fx.Node) -> tuple[Any, ...] | None:
    """Return the index by which a node is a view of another; None if it is no constant index."""
    if node.target not in _INDEX_VIEWS or node.kwargs or not isinstance(node.args[0], fx.Node):
        return None
    if any(isinstance(each, fx.Node) for each in node.args[1:]):
        return None
    dim, index = _INDEX_VIEWS[node.target](*node.args[1:])
    before: int = dim % node.args[0].meta["val"].dim()
    return (slice(None),) * before + (index,)


_INDEX_VIEWS: dict[Any, Callable[..., tuple[int, Any]]] = {
    _aten.slice.Tensor: lambda dim=0, start=None, end=None, step=1: (dim, slice(start, end, step)),
    _aten.select.int: lambda dim, index: (dim, index),
    _aten.narrow.default: lambda dim, start, length: (dim, slice(start, start + length)),
}


# ---- recording


def record_graph(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    recording: World,
    *,
    is_training: bool = False,
) -> fx.GraphModule:
    """Record the graph of a function of plain tensors, as the rank of a `RecordingWorld`.

    It runs on a thread of its own, as the caches of a thread belong to one rank.

    Arguments:
        inputs: meta tensors, or other values, which become constants.
        recording: the world to record in.
        is_training: whether the function differentiates. Then the operators of the backward are
            recorded too, and those of the forward are the ones below autograd.
    """
    results: list[Any] = []
    mode = torch.enable_grad if is_training else torch.no_grad

    def listening(*given: Any) -> Any:
        # Collectives know their causes only while there is a listener. It must be added within
        # make_fx, which replaces the module call that tracks the causes.
        with trace.listen(lambda event: None):
            return function(*given)

    def run() -> None:
        try:
            # Gather a tensor once for all its uses; the setting is of this thread only. Not in a
            # training step, where autograd runs the moves of the backward.
            state.keeps_gathers = not is_training
            with world.use(recording), mode(), _traceable_aliases(), _preserving_metadata():
                traced = make_fx(listening, tracing_mode="real", pre_dispatch=not is_training)
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
    """Return the same graph with new tensors in place of writes, as decomposed programs have it."""

    def run(*given: Any) -> Any:
        return fx.Interpreter(module).run(*given)

    with torch.no_grad(), _preserving_metadata():
        functional = torch.func.functionalize(run, remove="mutations")
        return make_fx(functional, tracing_mode="real")(*inputs)


@contextmanager
def _preserving_metadata() -> Iterator[None]:
    """Give recorded nodes the metadata of the nodes that are run."""
    # Without a FakeTensorMode in the context, make_fx makes a new one for each node, which takes
    # half of the time of a recording.
    context = TracingContext(FakeTensorMode())
    with tracing(context), fx_traceback.preserve_node_meta():
        yield


_recordings_lock = threading.Lock()
_recordings = 0


@contextmanager
def _traceable_aliases() -> Iterator[None]:
    """While any thread records, make aliases of DTensors by an operator that is recorded."""
    global _recordings
    with _recordings_lock:
        _recordings += 1
        DTensor._as_subclass = _as_subclass
    try:
        yield
    finally:
        with _recordings_lock:
            _recordings -= 1
            if not _recordings:
                DTensor._as_subclass = TensorBase.as_subclass


def _as_subclass(tensor: torch.Tensor, kind: type) -> torch.Tensor:
    with as_local():
        if kind is torch.Tensor:
            return _aten.alias.default(tensor)  # type: ignore[no-any-return]
        return torch.Tensor.as_subclass(tensor, kind)


def as_recorded_dtensor(local: torch.Tensor, layout: Layout) -> DTensor:
    """Wrap an input of a recording as the local shard of a DTensor."""
    made = wrap(_aten.alias.default(local), layout)
    annotate_tensor(made)
    return made


def as_local_shard(tensor: DTensor, layout: Layout) -> torch.Tensor:
    """Move a result of a recording to a layout, and return the local shard."""
    tensor._renew()
    with as_local():  # as an operator's input is moved, which reuses an earlier move
        result = move_input(tensor, plan_input_move(tensor._layout, layout, ()), "output")
    local = unwrap(result) if isinstance(result, DTensor) else result
    annotate_layout(node_of(local), layout)
    return local
