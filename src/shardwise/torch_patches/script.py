"""Patches of TorchScript, which takes the shards of DTensors for tensors.

Methods of scripted modules call `__torch_function__`; functions, traces and the parameters of
modules do not.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.dispatch import dispatch
from shardwise.dtensor.properties import check_whole
from shardwise.dtensor.tensor import DTensor, tensors_in
from shardwise.torch_internals import ScriptFunction, ScriptModule, script_modules, torch_c
from shardwise.torch_patches.constructors import call_on_whole, watched_with_lists
from shardwise.torch_patches.patch import Patch, Undo, replace, undo_all


def _dispatch_calls() -> Undo:
    def dispatched(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function, *given = args
        for each in tensors_in((given, kwargs)):
            if isinstance(each, DTensor):
                each._renew()
        return dispatch(DTensor, function, (DTensor,), tuple(given), kwargs)

    watched = watched_with_lists(ScriptFunction.__call__, dispatched)
    return replace(ScriptFunction, "__call__", watched)


def _refuse_examples() -> Undo:
    def checked(trace: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call_on_whole("torch.jit.trace", trace, args, kwargs)

    places = [
        (torch_c, "_create_function_from_trace"),
        (torch_c, "_create_function_from_trace_with_dict"),
        (ScriptModule, "_create_method_from_trace"),
        (ScriptModule, "_create_method_from_trace_with_dict"),
    ]
    return undo_all(
        [
            replace(owner, name, watched_with_lists(getattr(owner, name), checked))
            for owner, name in places
        ]
    )


def _refuse_parameters() -> Undo:
    create = script_modules.create_script_module

    def create_checked(nn_module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        for each in [*nn_module.parameters(), *nn_module.buffers()]:
            if isinstance(each, DTensor):
                check_whole("torch.jit", each)
        return create(nn_module, *args, **kwargs)

    return replace(script_modules, "create_script_module", create_checked)


PATCHES: tuple[Patch, ...] = (
    Patch(
        "torch.jit.ScriptFunction.__call__",
        "A scripted or traced function would run on shards. It is dispatched, as the methods of "
        "scripted modules are: on whole tensors.",
        _dispatch_calls,
    ),
    Patch(
        "torch._C._create_function_from_trace and _create_method_from_trace",
        "torch.jit.trace would record what happens to the shards of its examples: refused.",
        _refuse_examples,
    ),
    Patch(
        "torch.jit._recursive.create_script_module",
        "A scripted or traced module would keep the shards of DTensors as parameters: refused.",
        _refuse_parameters,
    ),
)
