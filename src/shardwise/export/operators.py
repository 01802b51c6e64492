"""Facts about operators and nodes: whether one can be traced, writes, communicates or is random.

Also the casts of `autocast`, which torch does not apply to meta tensors.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from shardwise.core.errors import ExportError, ShardwiseError
from shardwise.dtensor.tensor import DTensor
from shardwise.export.annotations import annotate_tensor
from shardwise.torch_internals import (
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    operator_name,
    pytree,
    schema_of,
)

_aten: Any = torch.ops.aten

# ---- can it be traced?

_TO_NUMBER = {torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default}


def check_operator(target: Any) -> None:
    """Raise ExportError for an operator that no rank's program can contain."""
    if isinstance(target, HigherOrderOperator):
        raise ExportError(
            f"exported_program: {target} has graphs of its own, which are not supported; export "
            "without it: the branch that is taken by Python's if, loops and scans by Python's for"
        )
    if target in _TO_NUMBER:
        raise ExportError(
            f"exported_program: {target} reads a number from a tensor, and the rest of the program "
            "may depend on it; such programs are not supported. Keep it a tensor"
        )


_DATA_ERROR = re.compile(
    r"\bmeta\b|register_meta|value out of a tracing tensor|data-dependent", re.I
)


def is_data_error(error: Exception) -> bool:
    """Check whether torch raised an error because meta tensors have no data."""
    is_ours = isinstance(error, ShardwiseError)
    return not is_ours and _DATA_ERROR.search(f"{type(error).__name__}: {error}") is not None


def data_needed_error(node: fx.Node, values: Sequence[Any]) -> ExportError:
    """Return the error for an operator whose communication depends on the values of tensors."""
    layouts = [repr(each._layout) for each in values if isinstance(each, DTensor)]
    return ExportError(
        f"exported_program: {node.name} ({node.target}) of {', '.join(layouts) or 'these values'}: "
        "for split dims, the communication depends on values of tensors, which are not known while "
        "a program is made. Keep the dims that it picks from or writes to whole: by the plan for "
        "parameters, buffers and constants, or by Activations for the module that it is in"
    )


def _group_norm(
    input: Any, weight: Any, bias: Any, n: int, c: int, space: int, groups: int, eps: float
) -> Any:
    return torch.group_norm(input, groups, weight, bias, eps)


# The statistics are replicated, which costs collectives; the first result alone may need none.
_FIRST_RESULT_ONLY: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.native_group_norm.default: _group_norm,
}


def first_result_function(node: fx.Node) -> Callable[..., Any] | None:
    """Return a cheaper function that computes only the first result of a node.

    None if there is no such function, or if another result of the node is used.
    """
    function = _FIRST_RESULT_ONLY.get(node.target)
    if function is None or any(
        user.target is not operator.getitem or user.args[1] != 0 for user in node.users
    ):
        return None
    return function


# ---- what does it do?


def writes(node: fx.Node) -> bool:
    """Check whether a node writes to one of its arguments."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    return schema_of(target).is_mutable or updates_statistics(target, node.args, node.kwargs)


def is_collective(node: fx.Node) -> bool:
    """Check whether a node is a collective."""
    target = node.target
    return (
        isinstance(target, OpOverload)
        and target.namespace == "_c10d_functional"
        and operator_name(target) != "wait_tensor"
    )


def is_random(node: fx.Node) -> bool:
    """Check whether a node draws random numbers."""
    return draws_random(node.target, node.args, node.kwargs)


def draws_random(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Check whether a call draws random numbers: dropout does not in evaluation or with p = 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    given = _arguments_by_name(target, args, kwargs)
    chance = given.get("dropout_p", given.get("dropout"))
    return given.get("train", given.get("training")) is not False and chance != 0


RUNNING_STATISTICS = ("running_mean", "running_var")
"""Arguments that norms write to although their schemas do not say so."""

_TRAINING_FLAG: dict[Any, str] = {
    torch.ops.aten.batch_norm.default: "training",
    torch.ops.aten.native_batch_norm.default: "training",
    torch.ops.aten.cudnn_batch_norm.default: "training",
    torch.ops.aten.instance_norm.default: "use_input_stats",
}
"""These norms, and the argument that says whether they write to the running statistics."""


def updates_statistics(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Check whether a call is that of a norm that writes to its running statistics."""
    flag = _TRAINING_FLAG.get(target)
    if flag is None:
        return False
    given = _arguments_by_name(target, args, kwargs)
    return bool(given[flag]) and any(given[name] is not None for name in RUNNING_STATISTICS)


def _arguments_by_name(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, with the defaults of its schema."""
    arguments = schema_of(target).arguments
    given = {each.name: each.default_value for each in arguments if each.has_default_value()}
    given |= dict(zip((each.name for each in arguments), args, strict=False))
    return given | dict(kwargs)


# ---- which nodes share memory, as far as their schemas tell

_MAY_RETURN_ARGUMENTS: set[Any] = {
    _aten.dropout.default,
    _aten.feature_dropout.default,
    _aten.alpha_dropout.default,
    _aten.feature_alpha_dropout.default,
    _aten.type_as.default,
    _aten.meshgrid.default,
    _aten.meshgrid.indexing,
    _aten.broadcast_tensors.default,
    _aten.atleast_1d.default,
    _aten.atleast_2d.default,
    _aten.atleast_3d.default,
    _aten.einsum.default,
}
"""Operators that may return an argument, as dropout in evaluation, against their schemas."""


def viewed_and_written(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the arguments that a node's result may be a view of, and those that it writes to."""
    target = node.target
    if not isinstance(target, OpOverload):
        return node.all_input_nodes, []
    if target is _aten.detach_.default:  # its schema says that it writes, but values stay the same
        return node.all_input_nodes, []
    if target in _MAY_RETURN_ARGUMENTS:
        return node.all_input_nodes, []
    viewed, written = [], []
    hidden = RUNNING_STATISTICS if updates_statistics(target, node.args, node.kwargs) else ()
    for at, argument in enumerate(schema_of(target).arguments):
        value = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
        nodes = [each for each in pytree.tree_leaves(value) if isinstance(each, fx.Node)]
        alias = argument.alias_info
        viewed += nodes if alias is not None else []
        if argument.name in hidden or (alias is not None and alias.is_write):
            written += nodes
    return viewed, written


class Aliases:
    """The memory that the nodes of a graph share, and the nodes that write to it.

    Arguments:
        graph: any graph; the caller of the graph can read the memory of its placeholders.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.origins: dict[fx.Node, set[fx.Node]] = {}
        """For each node, all nodes whose memory its result may share, itself included."""
        self.writers: dict[fx.Node, set[fx.Node]] = {}
        """For each origin, the nodes that write to its memory."""
        self._output = graph.output_node()
        self._position = {node: at for at, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            viewed, written = viewed_and_written(node)
            self.origins[node] = {node}.union(*(self.origins[each] for each in viewed))
            for each in written:
                for origin in self.origins[each]:
                    self.writers.setdefault(origin, set()).add(node)

    def is_written(self, node: fx.Node) -> bool:
        """Check whether any node writes to the memory of a node."""
        return any(each in self.writers for each in self.origins[node])

    def is_returned(self, node: fx.Node) -> bool:
        """Check whether the caller of the graph may get the memory of a node."""
        return node in self.origins[self._output]

    def would_differ_for_user(self, source: fx.Node, user: fx.Node) -> bool:
        """Check whether results would change if one user of a node got a copy of its value.

        They would if the user writes to the value or returns a view of it, some node writes to this
        memory from then on, and the original is still read beside the copy.
        """
        if all(source not in each for each in viewed_and_written(user)):
            return False
        return self._is_written_since(source, user) and self._is_used_beside(source, user)

    def would_differ_for_all(self, node: fx.Node) -> bool:
        """Check whether results would change if all users of a node got a copy of its value."""
        return self._is_written_since(node, node.next) and self._is_used_beside(node, node)

    def _is_written_since(self, node: fx.Node, since: fx.Node) -> bool:
        writers = (self.writers.get(each, ()) for each in self.origins[node])
        start = self._position[since]
        return any(self._position[each] >= start for found in writers for each in found)

    def _is_used_beside(self, node: fx.Node, copied: fx.Node) -> bool:
        """Check whether nodes that share memory with `node`, but not `copied`, are used later."""
        return any(
            other.op == "placeholder"
            or any(self._position[user] > self._position[copied] for user in other.users)
            for other, origins in self.origins.items()
            if copied not in origins and not self.origins[node].isdisjoint(origins)
        )


# ---- autocast

_COPY = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class Autocast:
    """The casts of a block within `torch.autocast`.

    Arguments:
        device: the device type given to `torch.autocast`.
        dtype: the dtype given to it; None for its default.
    """

    device: str
    dtype: torch.dtype | None

    def cast(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of an operator with the dtypes that autocast would give them.

        The operator runs twice on fake tensors of the device: with autocast, to see which arguments
        it casts, and without it on the cast arguments. If the two runs differ, autocast casts
        something within the operator too, and ExportError is raised.
        """
        if not isinstance(target, OpOverload):
            return args, kwargs
        leaves, structure = pytree.tree_flatten((args, kwargs))
        with disable_proxy_modes_tracing(), FakeTensorMode():
            given = [self._as_fake(each) for each in leaves]
            cast = _CastObserver(given)
            with torch.autocast(self.device, self.dtype), cast:
                result = _run(target, given, structure)
            plain = _CastObserver([])
            with torch.autocast(self.device, enabled=False):
                changed = list(map(_to_dtype, given, cast.dtypes))
                with plain:
                    again = _run(target, changed, structure)
        if cast.operators != plain.operators or _dtypes_of(result) != _dtypes_of(again):
            raise ExportError(
                f"exported_program: {target} is within autocast, which casts tensors inside the "
                "operator, not only its arguments; convert its arguments with to(dtype) in the "
                "model, or leave it out of autocast"
            )
        leaves = list(map(_to_dtype, leaves, cast.dtypes))
        pytree.tree_map_only(torch.Tensor, annotate_tensor, leaves)
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        return args, kwargs

    def _as_fake(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty(value.shape, dtype=value.dtype, device=self.device)
        return torch.device(self.device) if isinstance(value, torch.device) else value


class _CastObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the casts of the given tensors, and all other operators that run.

    Arguments:
        given: the tensors whose casts are recorded in `dtypes`, at the same positions.
    """

    def __init__(self, given: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = given
        self.dtypes: list[torch.dtype | None] = [None] * len(given)
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        positions = [at for at, each in enumerate(self._given) if args and each is args[0]]
        if func is _COPY and positions and "dtype" in kwargs and not self.operators:
            for at in positions:
                self.dtypes[at] = kwargs["dtype"]
        elif func.namespace == "aten":
            self.operators.append(func)
        return func(*args, **kwargs)


def _run(target: Any, leaves: list[Any], structure: Any) -> Any:
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return target(*args, **kwargs)


def _to_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    return value if dtype is None else value.to(dtype)


def _dtypes_of(result: Any) -> list[Any]:
    return [getattr(each, "dtype", None) for each in pytree.tree_leaves(result)]
