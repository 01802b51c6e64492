"""The forward of a sharded module: prepare its inputs, call it, and hook into its backward.

Forward: the schedule gathers the parameters, the module runs, the schedule reshards them.
Backward: the first gradient of an output tells the schedule to gather the parameters again; once
the gradients of all inputs and parameters are computed, the schedule reshards them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.dtensor.shard_sizes import note_same_shape
from shardwise.dtensor.tensor import DTensor, wrap
from shardwise.fsdp.param_group import ForwardCall, ParamGroup
from shardwise.fsdp.root import schedule_of
from shardwise.parallel.containers import map_tensors
from shardwise.torch_internals import as_local, base_of, current_graph_task, storage_id

_TENSOR_TYPES = (torch.Tensor, DTensor)


def run_forward(
    module: nn.Module,
    group: ParamGroup,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a function of a sharded module with its parameters gathered.

    Arguments:
        module: one of the group's modules.
        function: its forward, or another method of it.
    """
    schedule = group.schedule
    if schedule is None or schedule.depth == 0:
        schedule = schedule_of(group)
        schedule.begin_forward(group)
    call = ForwardCall()
    schedule.enter(group)
    try:
        is_recompute = schedule.begin_group_forward(group)
        policy = group.policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), policy.param_dtype)
        if not is_recompute and torch.is_grad_enabled() and not group.is_alias:
            args, kwargs = _watch_inputs(group, call, args, kwargs)
        output = function(*args, **kwargs)
    except BaseException:
        (group.schedule or schedule).fail_forward(group)
        raise
    schedule = group.schedule or schedule  # a module that was added meanwhile has made a new one
    if policy.output_dtype is not None:
        output = _cast(output, policy.output_dtype)
    if schedule.leave(group):
        output = _copy_views_of_params(group, output)
        needs_backward = False
        if torch.is_grad_enabled():
            hidden = [] if group.is_alias else _find_hidden_outputs(group, call)
            needs_backward = _watch_outputs(group, call, (output, hidden) if hidden else output)
        schedule.end_group_forward(group, module, needs_backward)
    if schedule.depth == 0:
        schedule.end_forward()
    return output


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(value, change)


def _watch_inputs(
    group: ParamGroup, call: ForwardCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tell the schedule when all inputs have their gradients, after which backward does not need
    the parameters any more.

    The inputs are replaced by views, so that only the gradients from this forward count.
    """

    def note_grad(_: torch.Tensor) -> None:
        call.grads_left -= 1
        if not call.grads_left:
            group.open_calls.discard(call)
            assert group.schedule is not None, "its forward has set it"
            group.schedule.check_group_backward_done(group)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        call.input_count += 1
        if isinstance(tensor, DTensor):
            tensor.wait()  # its data may be under way, and a view would not wait for them
        with as_local():
            view: Any = tensor.view_as(tensor)
            note_same_shape(view)
            view.register_hook(note_grad)
        return wrap(view, tensor._layout) if isinstance(tensor, DTensor) else view

    if all(isinstance(each, torch.Tensor) for each in args) and not kwargs:
        args = tuple(map(change, args))
    else:
        args, kwargs = map_tensors((args, kwargs), change)
    # Frozen parameters may be needed, to the end of backward, for gradients of inputs that are
    # not visible here.
    has_frozen = any(len(unit.trainable) < len(unit.params) for unit in group.units)
    if call.input_count or has_frozen:
        call.is_watched, call.grads_left = True, call.input_count
        group.open_calls.add(call)
    return args, kwargs


def _watch_outputs(group: ParamGroup, call: ForwardCall, output: Any) -> bool:
    """Tell the schedule when the first gradient of an output arrives. Return whether any output
    can get a gradient."""
    requires_grad = False

    def note_grad(_: torch.Tensor) -> None:
        assert group.schedule is not None, "its forward has set it"
        task = current_graph_task()
        if call.is_watched and call.task != task:  # a second backward, of a retained graph
            call.task, call.grads_left = task, call.input_count
            group.open_calls.add(call)
        group.schedule.begin_group_backward(group)

    def watch(tensor: Any) -> Any:
        nonlocal requires_grad
        if tensor.requires_grad:
            requires_grad = True
            with as_local():
                tensor.register_hook(note_grad)
                # A view that is changed in place gets a new history; its base keeps the old one.
                base = base_of(tensor)
                if base is not None and call.has_computed(base):
                    base.register_hook(note_grad)
        return tensor

    if isinstance(output, torch.Tensor):
        watch(output)
    else:
        map_tensors(output, watch)
    return requires_grad


def _find_hidden_outputs(group: ParamGroup, call: ForwardCall) -> list[torch.Tensor]:
    """Return tensors that a forward has computed and stored as attributes, such as an auxiliary
    loss. Backward may begin with them, and then needs the parameters."""
    return [
        value
        for module in group.own_modules
        for value in vars(module).values()
        if type(value) in _TENSOR_TYPES  # far faster than isinstance, for a case that is rare
        and call.has_computed(value)
    ]


def _copy_views_of_params(group: ParamGroup, output: Any) -> Any:
    """Replace outputs that are views of gathered parameters by copies, as that memory is freed."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        with as_local():
            address = storage_id(tensor.untyped_storage()) if not tensor.is_sparse else 0
        return tensor.clone() if any(unit.owns_storage(address) for unit in group.units) else tensor

    return change(output) if isinstance(output, torch.Tensor) else map_tensors(output, change)
