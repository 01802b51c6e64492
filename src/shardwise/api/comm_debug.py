"""`CommDebugMode`: count the collectives of a block, by module and direction, as torch's does.

`shardwise.listen` hears the same collectives with their bytes, axes and causes.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from shardwise.comm.trace import Event, call_watcher, listen, watch_calls
from shardwise.core import world
from shardwise.core.layout import Layout
from shardwise.core.placement import Placement
from shardwise.dtensor.tensor import DTensor, tensors_in
from shardwise.rules.registry import name_of
from shardwise.torch_internals import TorchDispatchMode, current_graph_task, functional_operators

GLOBAL = "Global"
"""The name of what happens outside of modules, and of all modules together."""

_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
    "exchange": "all_to_all_single",
    "broadcast": "broadcast",
}
"""The functional collective that torch's DTensor would use for each kind."""
_DATA_PARALLEL = {
    "all_gather": "_allgather_base_",
    "reduce_scatter": "_reduce_scatter_base_",
    "all_reduce": "allreduce_",
    "broadcast": "broadcast_",
}
"""The operator of c10d that torch's FSDP2 would use."""
_OTHER = {"gather": "gather_", "scatter": "scatter_", "gather_objects": "allgather_"}
_COUNTED = {
    *("all_reduce", "all_reduce_coalesced", "all_gather_into_tensor", "broadcast"),
    *("all_gather_into_tensor_coalesced", "reduce_scatter_tensor", "all_to_all_single"),
    *("reduce_scatter_tensor_coalesced", "_allgather_base_", "_reduce_scatter_base_"),
    *("allgather_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "allreduce_"),
    *("allreduce_coalesced_", "alltoall_", "alltoall_base_", "broadcast_", "gather_", "scatter_"),
    *("reduce_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"),
}
"""The collectives that a program may call itself, in the namespaces of c10d."""
_TRIVIAL = {"detach", "t", "view", "_to_copy", "as_strided", "transpose", "alias", "to"}


@dataclass(slots=True)
class _Operation:
    """An operator that ran, in a module."""

    name: str
    is_backward: bool
    is_checkpointing: bool
    layouts: tuple[Layout, ...] = ()
    """Those of the DTensors among its arguments."""

    def as_dict(self) -> dict[str, Any]:
        """Return the operation as torch describes it."""
        return {
            "name": self.name,
            "input_shape": [str(each.size) for each in self.layouts],
            "input_sharding": [str(each.placements) for each in self.layouts],
            "device_mesh": str(self.layouts[0].mesh) if self.layouts else "",
            "is_bw": self.is_backward,
            "is_activation_checkpointing": self.is_checkpointing,
        }


@dataclass(slots=True)
class _Module:
    """A module that ran, and what happened in it."""

    parent: str | None
    depth: int
    type: str = ""
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    operations: list[_Operation] = field(default_factory=list)
    counts: dict[str, dict[Any, int]] = field(
        default_factory=lambda: {"forward": defaultdict(int), "backward": defaultdict(int)}
    )


class CommDebugMode:
    """A context manager that counts this rank's collectives, for each module and direction.

    The keys of counts are the operators that torch's own mode reports: functional collectives, for
    those of DTensors (`torch.ops.c10d_functional.all_reduce`), and c10d's for those of data
    parallelism (`torch.ops.c10d._allgather_base_`) and those that a program calls itself. Entering
    it again starts anew.

    Example:
        >>> with CommDebugMode() as mode:
        ...     model(x).sum().backward()
        >>> mode.get_total_counts(), mode.get_comm_counts()[torch.ops.c10d_functional.all_reduce]
    """

    def __init__(self) -> None:
        self.comm_counts: dict[Any, int] = defaultdict(int)
        self._modules: dict[str, _Module] = {}
        self._running: list[str] = []
        self._roots: list[str] = []
        self._names: dict[int, str] = {}
        self._active = ExitStack()

    def __enter__(self) -> CommDebugMode:
        self.comm_counts.clear()
        self._modules = {GLOBAL: _Module(None, 0)}
        self._running, self._roots, self._names = [], [], {}
        self._thread, self._rank = threading.get_ident(), world.current(start=False).rank
        with ExitStack() as active:
            active.callback(register_module_forward_pre_hook(self._enter_module).remove)
            leave = register_module_forward_hook(self._leave_module, always_call=True)
            active.callback(leave.remove)
            active.enter_context(listen(self._hear))
            active.enter_context(watch_calls(self._watcher(call_watcher())))
            active.enter_context(_LocalOperators(self))
            self._active = active.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._active.close()

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"

    # ---- results

    def get_total_counts(self) -> int:
        """Return the number of collectives."""
        return sum(self.comm_counts.values())

    def get_comm_counts(self) -> dict[Any, int]:
        """Return the number of collectives of each kind."""
        return self.comm_counts

    def get_parameter_info(self) -> dict[str, dict[str, Any]]:
        """Return the parameters of each module that ran."""
        return {name: each.parameters for name, each in self._modules.items() if each.parameters}

    def get_sharding_info(self) -> dict[str, Any]:
        """Return the placements of each parameter that is a DTensor, by its whole name."""
        return {
            f"{name}.{key}": placements
            for name, each in self._modules.items()
            for key, placements in _placements(each).items()
        }

    @property
    def comm_module_counts(self) -> dict[str, dict[str, dict[Any, int]]]:
        """The number of collectives by module, direction ("forward", "backward") and kind. A module
        has those of the modules within it."""
        return {name: each.counts for name, each in self._modules.items()}

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """Return a table of collectives and operations by module.

        Arguments:
            noise_level: 0 for collectives; 1 with modules, their parameters and calls on DTensors;
                2 with the operators that run on shards, too; 3 with trivial ones.
        """
        lines = []
        for name, each in self._modules.items():
            indent = "    " * each.depth
            lines.append(f"{indent}{name}")
            if noise_level > 0:
                lines += [f"{indent}*module type: {each.type}"] if each.type else []
                placed = _placements(each)
                lines += [f"{indent}*Parameter List"] if placed else []
                lines += [f"{indent} *{key}: {value}" for key, value in placed.items()]
            for title, counts, operations in _passes(each, noise_level):
                if not counts and not operations:
                    continue
                lines.append(f"{indent}  {title}")
                lines += [f"{indent}    *{kind}: {count}" for kind, count in counts.items()]
                for operation in operations:
                    lines += [f"{indent}    {line}" for line in _described(operation)]
        return "\n".join(lines) + "\n"

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Write the table to a file."""
        with open(file_name, "w", encoding="utf-8") as file:
            file.write(self.generate_comm_debug_tracing_table(noise_level))

    def generate_json_dump(
        self, file_name: str = "comm_mode_log.json", noise_level: int = 3
    ) -> None:
        """Write what the table shows to a file, as JSON: modules with their children."""
        with open(file_name, "w", encoding="utf-8") as file:
            json.dump(self._as_json(GLOBAL, noise_level), file, indent=4)

    def _as_json(self, name: str, noise_level: int) -> dict[str, Any]:
        each = self._modules[name]
        forward, backward, checkpointing = _passes(each, noise_level)
        return {
            "fqn": name,
            "module_type": each.type if noise_level > 0 else "",
            "parameters": [
                (key, str(placements))
                for key, placements in _placements(each).items()
                if noise_level > 0
            ],
            "children": [
                self._as_json(child, noise_level)
                for child, other in self._modules.items()
                if other.parent == name
            ],
            "collectives_forward": [(str(kind), count) for kind, count in forward[1].items()],
            "collectives_backward": [(str(kind), count) for kind, count in backward[1].items()],
            "operations_forward": [each.as_dict() for each in forward[2]],
            "operations_backward": [each.as_dict() for each in backward[2]],
            "operations_checkpointing": [each.as_dict() for each in checkpointing[2]],
        }

    # ---- what happens

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        if not self._running:
            root = type(module).__name__
            self._roots.append(root)
            self._names = {
                id(each): f"{root}.{path}" if path else root
                for path, each in module.named_modules(remove_duplicate=False)
            }
        parent = self._running[-1] if self._running else GLOBAL
        name = self._names.get(id(module), f"{parent}.{type(module).__name__}")
        self._running.append(name)
        if name not in self._modules:
            parameters: dict[str, torch.Tensor] = dict(module.named_parameters(recurse=False))
            kind = type(module)
            self._modules[name] = _Module(
                parent, len(self._running), f"{kind.__module__}.{kind.__qualname__}", parameters
            )

    def _leave_module(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._running:  # else the module began before this context
            self._running.pop()

    def _hear(self, event: Event) -> None:
        if threading.get_ident() != self._thread and event.rank != self._rank:
            return  # of another simulated rank
        kind = _operator_of(event)
        if kind is not None:
            self.count(kind, event.cause.direction, self._module_of(event))

    def _module_of(self, event: Event) -> str:
        """Return the module that a collective belongs to: in backward, the one of the forward.

        A module's own hooks run after the global ones, so `_running` may lack it: its cause tells.
        """
        path = event.cause.module.split(",")[0]
        if path:
            names = [f"{root}.{path}" for root in self._roots]
            return next((name for name in reversed(names) if name in self._modules), GLOBAL)
        is_forward = event.cause.direction == "forward"
        return self._running[0] if self._running and is_forward else GLOBAL

    def count(self, kind: Any, direction: str, module: str | None = None) -> None:
        """Count a collective in a module, by default the running one, and in those around it."""
        self.comm_counts[kind] += 1
        at: str | None = module or self._current()
        while at is not None:
            self._modules[at].counts[direction][kind] += 1
            at = self._modules[at].parent

    def _watcher(self, outer: Callable[..., Any] | None) -> Callable[..., Any]:
        def watch(func: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
            tensors = tensors_in((args, kwargs))
            self.note(name_of(func), [each._layout for each in tensors if type(each) is DTensor])
            return run() if outer is None else outer(func, args, kwargs, run)

        return watch

    def note(self, name: str, layouts: Sequence[Layout] = ()) -> None:
        """Note an operator that runs in the current module."""
        is_backward = current_graph_task() != -1
        operation = _Operation(
            name, is_backward, is_backward and bool(self._running), tuple(layouts)
        )
        self._modules[self._current()].operations.append(operation)

    def _current(self) -> str:
        return self._running[-1] if self._running else GLOBAL


class _LocalOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operators on shards and plain tensors, and counts the program's own collectives."""

    def __init__(self, mode: CommDebugMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, _, name = str(func).partition(".")
        name = name.partition(".")[0]
        self._mode.note(f"{namespace}.{name}")
        if "c10d" in namespace and name in _COUNTED and not _is_ours():
            kinds = functional_operators() if "functional" in namespace else torch.ops.c10d
            direction = "forward" if current_graph_task() == -1 else "backward"
            self._mode.count(getattr(kinds, name), direction)
        return result


def _is_ours() -> bool:
    """Tell whether shardwise calls a collective, which listeners hear, and not the program."""
    frame: Any = sys._getframe()
    while frame is not None:
        package, _, rest = str(frame.f_globals.get("__name__")).partition(".")
        if package == "shardwise" and rest.startswith("comm."):
            return True
        if package not in ("shardwise", "torch"):
            return False
        frame = frame.f_back
    return False


def _operator_of(event: Event) -> Any:
    """Return the operator of torch that a collective is counted as; None for one that torch does
    not count."""
    if event.cause.operator in ("unshard", "reduce_gradients") and event.kind in _DATA_PARALLEL:
        return getattr(torch.ops.c10d, _DATA_PARALLEL[event.kind])
    if event.kind in _FUNCTIONAL:
        return getattr(functional_operators(), _FUNCTIONAL[event.kind])
    return getattr(torch.ops.c10d, _OTHER[event.kind]) if event.kind in _OTHER else None


_Pass = tuple[str, dict[Any, int], list[_Operation]]


def _passes(module: _Module, noise_level: int) -> tuple[_Pass, _Pass, _Pass]:
    """Return the title, collectives and operations of forward, backward and recomputation."""
    shown = list(_visible(module.operations, noise_level))
    forward = [each for each in shown if not each.is_backward]
    again = [each for each in shown if each.is_checkpointing]
    backward = [each for each in shown if each.is_backward and not each.is_checkpointing]
    return (
        ("FORWARD PASS", module.counts["forward"], forward),
        ("BACKWARD PASS", module.counts["backward"], backward),
        ("ACTIVATION CHECKPOINTING", {}, again),
    )


def _visible(operations: Sequence[_Operation], noise_level: int) -> Iterator[_Operation]:
    """Yield the operations that a table of this noise level lists."""
    for each in operations:
        is_trivial = each.name.rpartition(".")[2] in _TRIVIAL
        if noise_level > 2 or (
            not is_trivial and (noise_level == 2 or (noise_level == 1 and each.layouts))
        ):
            yield each


def _described(operation: _Operation) -> Iterator[str]:
    """Yield the lines that describe an operation."""
    yield f"**{operation.name}"
    if operation.layouts:
        yield f"  shape: {[each.shape for each in operation.layouts]}"
        yield f"  sharding: {[each.placements for each in operation.layouts]}"
        yield f"  device mesh: {operation.layouts[0].mesh}"


def _placements(module: _Module) -> dict[str, tuple[Placement, ...]]:
    """Return the placements of a module's parameters that are DTensors."""
    return {
        key: parameter.placements
        for key, parameter in module.parameters.items()
        if isinstance(parameter, DTensor)
    }
