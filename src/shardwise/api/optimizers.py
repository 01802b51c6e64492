"""Steps of pointwise optimizers on the shards, at the speed of plain tensors; checks of steps.

The state of a pointwise optimizer has the layouts of the parameters, so that parameters, gradients
and state can be plain local tensors during a step. Every other optimizer, and a step with a
closure (which runs the model), goes through dispatch.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import optim
from torch.autograd.graph import increment_version

from shardwise.core.errors import ShardwiseError
from shardwise.dtensor.tensor import DTensor, as_layout, wrap
from shardwise.dtensor.view_copy import linked, mark_outdated


class OptimizerError(ShardwiseError, RuntimeError):
    """A step of an optimizer that would not train the module's parameters."""


POINTWISE: frozenset[type[optim.Optimizer]] = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.Adagrad,
        optim.RMSprop,
        optim.Adamax,
        optim.Adadelta,
        optim.NAdam,
        optim.RAdam,
        optim.ASGD,
        optim.Rprop,
    }
)
"""Optimizers whose step is pointwise. Subclasses do not count: they may do anything in a step."""

_COUNTERS = ("step", "eta", "mu", "mu_product")
"""State that belongs to the parameter as a whole, and does not have its shape."""


def load_value(
    load: Callable[..., torch.Tensor],
    param: torch.Tensor,
    value: torch.Tensor,
    param_id: Any,
    param_groups: Any,
    key: Any = None,
) -> torch.Tensor:
    """Convert one tensor of a state dict for an optimizer that loads it.

    State of the parameter's shape gets the parameter's layout, also if a single process saved it.

    Arguments:
        load: torch's conversion, of dtype and device.
    """
    result = load(param, value, param_id, param_groups, key)
    if type(param) is not DTensor or key in _COUNTERS or param._layout.partial:
        return result
    shape = tuple(result.shape)
    is_piece = type(result) is not DTensor and shape == param._layout.local_shape()
    if shape != param._layout.shape and not is_piece:
        return result
    return as_layout(result, param._layout, f"state {key}")


# ---- notes on parameters: attributes, because they must survive copies and pickles of a model


def note_replaced(parameter: torch.Tensor, name: str) -> None:
    """Note that another tensor has replaced this parameter in its module: it gets no gradients."""
    parameter._replaced_name = name  # type: ignore[attr-defined]


def note_in_use(parameter: torch.Tensor) -> None:
    """Note that a module has this parameter, also if another one had replaced it before."""
    vars(parameter).pop("_replaced_name", None)


class GradientAverage(Protocol):
    """How the gradients of a parameter are averaged over ranks, each with a loss of its own."""

    ranks: int
    """The number of ranks."""

    @property
    def key(self) -> Any:
        """Equal for parameters whose gradients are averaged alike."""

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss whose gradient the averaged gradient is. Every rank must call it."""


def note_averaged(parameter: torch.Tensor, average: GradientAverage) -> None:
    """Note that the gradient of this parameter is averaged over ranks, and how."""
    parameter._gradient_average = average  # type: ignore[attr-defined]


def is_averaged(parameter: torch.Tensor) -> bool:
    """Return whether the gradient of this parameter is reduced over ranks after it was computed:
    whether it is a shard of `fully_shard` or `replicate`."""
    return hasattr(parameter, "_gradient_average")


def _average_of(parameter: torch.Tensor) -> GradientAverage | None:
    found: GradientAverage | None = getattr(parameter, "_gradient_average", None)
    return found if found is not None and found.ranks > 1 else None


def note_left_alone(parameters: Iterable[torch.Tensor]) -> None:
    """Note that the user does not want the gradients of these parameters to be averaged."""
    for parameter in parameters:
        parameter._is_left_alone = True  # type: ignore[attr-defined]


# ---- checks before a step

_stepped: WeakSet[optim.Optimizer] = WeakSet()
"""Optimizers that have made a step."""


def _warn_of_forgotten(optimizer: optim.Optimizer) -> None:
    """Warn at the first step if some parameters are data-parallel and others were left out."""
    if optimizer in _stepped:
        return
    _stepped.add(optimizer)
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(_average_of(each) is not None for each in every):
        return
    forgotten = [
        each
        for each in every
        if type(each) is not DTensor
        and each.grad is not None
        and not hasattr(each, "_is_left_alone")
    ]
    if forgotten:
        warnings.warn(
            f"{type(optimizer).__name__}: {len(forgotten)} of {len(every)} parameters, the "
            f"first of shape {tuple(forgotten[0].shape)}, are in no module that fully_shard or "
            "replicate was called on, and others are: nobody averages their gradients, so they "
            "will differ from rank to rank. Call it on the whole model too, after its layers; or "
            "name them in ignored_params if you see to them yourself",
            stacklevel=4,
        )


def _check_replaced(optimizer: optim.Optimizer) -> None:
    """Refuse a step on parameters that were replaced in their module: it would have no effect."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = getattr(parameter, "_replaced_name", None)
            if name is not None and parameter.grad is None:
                raise OptimizerError(
                    f"{type(optimizer).__name__}: expected the parameters that the module has, got "
                    f"{name} as it was before another tensor replaced it; make the optimizer after "
                    "fully_shard, replicate, shard_module, parallelize_module, distribute_module, "
                    "load_state_dict(assign=True) and conversions that make new parameters"
                )


def before_step(
    optimizer: optim.Optimizer, args: Any, kwargs: Any
) -> tuple[Any, dict[str, Any]] | None:
    """Check an optimizer's parameters: torch calls this before every step of every optimizer.

    Returns:
        The arguments of the step, if they change.
    """
    _check_replaced(optimizer)
    _warn_of_forgotten(optimizer)
    has_closure = len(args) > 1 or kwargs.get("closure") is not None
    if has_closure and type(optimizer) not in POINTWISE:
        return _with_global_loss(optimizer, args, kwargs)
    return None


# ---- closures


def _with_global_loss(
    optimizer: optim.Optimizer, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Return the arguments of a step, with a closure that returns the loss of all ranks.

    An optimizer such as LBFGS compares losses with gradients, and decides by them how often it
    calls the closure. The gradients are those of all ranks, so the loss must be, too. A pointwise
    optimizer only returns the loss, and leaves it as it is.
    """
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    averages = {found.key: found for each in every if (found := _average_of(each)) is not None}
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not averages or not callable(closure):
        return None
    if len(averages) > 1:
        raise OptimizerError(
            f"{type(optimizer).__name__}: expected parameters whose gradients are averaged over "
            "the same ranks, with the same divide factor, as one loss decides about all; got "
            f"{len(averages)} kinds; shard all of them on one mesh, or use an optimizer for each"
        )
    (average,) = averages.values()

    @functools.wraps(closure)
    def of_all_ranks() -> Any:
        loss = closure()
        if isinstance(loss, torch.Tensor):
            with torch.no_grad():
                found = loss.detach()
                return average(found.full_tensor() if isinstance(found, DTensor) else found)
        if isinstance(loss, int | float):
            return average(torch.tensor(loss, dtype=torch.float64)).item()
        return loss

    if len(args) > 1:
        return (args[0], of_all_ranks, *args[2:]), kwargs
    return args, {**kwargs, "closure": of_all_ranks}


def after_step(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Note that parameters have changed: torch calls this after every step of every optimizer."""
    if type(optimizer) not in POINTWISE:  # `on_shards` notes it for these, also after an error
        _note_changes(optimizer)


# ---- steps on shards


def on_shards(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the step of a pointwise optimizer so that it runs on the shards as plain tensors.

    Hooks run outside of the wrapped step, and see DTensors.
    """

    @functools.wraps(step)
    def step_on_shards(self: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        shards = None
        if type(self) in POINTWISE and not args and not kwargs:
            shards = _shards(self)
        if not shards:
            try:
                return step(self, *args, **kwargs)
            finally:
                _note_changes(self)
        for tensor in shards:
            tensor.__class__ = torch.Tensor
        try:
            return step(self)
        finally:
            for tensor in shards:
                tensor.__class__ = DTensor
                if linked.by_memory:
                    mark_outdated(tensor, type(self).__name__)
            _wrap_new_state(self)
            _note_changes(self)

    return step_on_shards


def _note_changes(optimizer: optim.Optimizer) -> None:
    """Mark gathered and copied values of the parameters as out of date.

    Fused kernels of torch change parameters without a change of their versions.
    """
    for group in optimizer.param_groups:
        if group.get("fused"):
            increment_version([each for each in group["params"] if type(each) is DTensor])
        if linked.by_memory:
            for each in group["params"]:
                mark_outdated(each, type(optimizer).__name__)


def _shards(optimizer: optim.Optimizer) -> list[Any] | None:
    """List the DTensors of a step; None if a gradient or state has another layout than its
    parameter."""
    found: list[Any] = []
    for group in optimizer.param_groups:
        if group.get("differentiable") or any(type(each) is DTensor for each in group.values()):
            return None
        for parameter in group["params"]:
            if type(parameter) is not DTensor:
                continue
            layout = parameter._layout
            gradient = parameter.grad
            if gradient is None:
                continue
            state = optimizer.state.get(parameter, {}).values()
            tensors = [gradient, *(each for each in state if type(each) is DTensor)]
            if layout.partial or any(each._layout is not layout for each in tensors):
                return None
            found.append(parameter)
            found += tensors
    return found


def _wrap_new_state(optimizer: optim.Optimizer) -> None:
    """Wrap the state that the first step made as plain tensors of a shard's shape."""
    for parameter, state in optimizer.state.items():
        if type(parameter) is DTensor:
            for name, value in state.items():
                is_new = type(value) is torch.Tensor and name not in _COUNTERS
                if is_new and tuple(value.shape) == parameter._layout.local_shape():
                    wrap(value, parameter._layout)
