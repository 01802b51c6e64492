"""Hooks for gradients that torch registers in the graph, for parameters that are not in it.

Modules of `fully_shard` compute with gathered parameters. The shards, which users see, get their
gradients when these are reduced: during a backward, or at its end. FSDP then calls the hooks of a
shard (`register_hook`, `register_post_accumulate_grad_hook`). Hooks on nodes of the graph would
never run.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.autograd import graph

from shardwise.api.optimizers import is_averaged
from shardwise.core.errors import DispatchError
from shardwise.torch_internals import (
    APPLY_IN_BACKWARD,
    IN_BACKWARD_OPTIMIZERS,
    OPTIMIZER_IN_BACKWARD,
    current_graph_task,
    engine,
)
from shardwise.torch_patches.patch import Patch, Undo, replace, when_imported


def _hook_several() -> Undo:
    original = graph.register_multi_grad_hook

    @functools.wraps(original)
    def register_multi_grad_hook(
        tensors: Sequence[torch.Tensor], fn: Any, *, mode: str = "all"
    ) -> Any:
        tensors = tuple(tensors)
        if mode != "all" or not any(map(is_averaged, tensors)):
            return original(tensors, fn, mode=mode)  # type: ignore[arg-type]
        collected = _Collected(len(tensors), fn)
        given: Any = enumerate(tensors)
        return _Handles(
            [each.register_hook(functools.partial(collected.put, index)) for index, each in given]
        )

    return replace(graph, "register_multi_grad_hook", register_multi_grad_hook)


class _Collected:
    """The gradients of one backward; `function` gets them at its end, when all are there."""

    def __init__(self, count: int, function: Callable[[Any], None]) -> None:
        self._count = count
        self._function = function
        self._found: dict[int, list[torch.Tensor | None]] = {}
        """By the number of the backward."""
        self._lock = threading.Lock()

    def put(self, index: int, gradient: torch.Tensor) -> None:
        task = current_graph_task()
        if task == -1:
            raise DispatchError(
                "register_multi_grad_hook: a gradient of fully_shard was reduced after its "
                "backward, as set_is_last_backward(False) and manual finalization allow; register "
                "a hook on each parameter: parameter.register_hook(...)"
            )
        with self._lock:
            is_first = task not in self._found
            self._found.setdefault(task, [None] * self._count)[index] = gradient
        if is_first:
            # The callback of a callback runs after all others, and so after FSDP's last reductions.
            engine.queue_callback(
                lambda: engine.queue_callback(lambda: self._function(self._found.pop(task)))
            )


class _Handles(torch.utils.hooks.RemovableHandle):
    """Removes several hooks."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self.handles = tuple(handles)

    def remove(self) -> None:
        """Remove them."""
        for each in self.handles:
            each.remove()

    def __getstate__(self) -> Any:
        return self.handles

    def __setstate__(self, state: Any) -> None:
        self.handles = state


def _step_in_backward(module: ModuleType) -> Undo:
    original = getattr(module, APPLY_IN_BACKWARD)

    @functools.wraps(original)
    def apply_optimizer_in_backward(
        optimizer_class: Any,
        params: Iterable[Any],
        optimizer_kwargs: dict[str, Any],
        register_hook: bool = True,
    ) -> None:
        for each in params:
            is_shard = is_averaged(each)
            original(optimizer_class, [each], optimizer_kwargs, register_hook and not is_shard)
            if register_hook and is_shard:
                handle = each.register_post_accumulate_grad_hook(_step)
                module.param_to_optim_hook_handle_map.setdefault(each, []).append(handle)

    package = module.__name__.rpartition(".")[0]

    def exchange(before: Any, after: Any) -> None:
        for each in (module, sys.modules.get(package)):  # the package has the same name
            if getattr(each, APPLY_IN_BACKWARD, None) is before:
                setattr(each, APPLY_IN_BACKWARD, after)

    exchange(original, apply_optimizer_in_backward)
    return functools.partial(exchange, apply_optimizer_in_backward, original)


def _step(parameter: Any) -> None:
    for optimizer in getattr(parameter, IN_BACKWARD_OPTIMIZERS):
        optimizer.step()
    parameter.grad = None


PATCHES = (
    Patch(
        "torch.autograd.graph.register_multi_grad_hook",
        "It counts nodes of the graph that will run, and those of FSDP's shards never do: the hook "
        "would not be called.",
        _hook_several,
    ),
    Patch(
        "torch.distributed.optim.apply_optimizer_in_backward._apply_optimizer_in_backward",
        "It hooks into nodes of the graph, and those of FSDP's shards never run: nothing would be "
        "updated.",
        functools.partial(when_imported, OPTIMIZER_IN_BACKWARD, _step_in_backward),
    ),
)
