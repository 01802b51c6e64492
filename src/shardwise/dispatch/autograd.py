"""backward, grad, hooks and custom functions: autograd sees local tensors, the user DTensors.

The gradient of a DTensor has the tensor's layout, with pending sums reduced (`gradient_layout`). A
backward can start from a loss that is a pending sum without a reduction: the gradient of each
contribution is that of the loss.

Custom autograd functions bypass `__torch_function__`, so `torch_patches` guards their `apply`.
Such a function would see DTensors in its forward and plain local gradients in its backward. So it
runs on local tensors if its DTensors are replicated, and is refused otherwise. Three functions of
torch are known: two hand tensors through, and one samples, for which its input is replicated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from shardwise.core.errors import DispatchError, LayoutError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.dispatch.collectives import on_local_tensors
from shardwise.dtensor.call_args import Args, Kwargs, common_mesh
from shardwise.dtensor.input_moves import check_gradient
from shardwise.dtensor.tensor import GRADIENT_SOURCE, DTensor, as_layout, unwrap, wrap
from shardwise.dtensor.view_copy import linked, mark_gradients_outdated
from shardwise.redistribute.accumulate import after_completion, suspended
from shardwise.redistribute.autograd import with_grad_layout
from shardwise.redistribute.plan import gradient_layout
from shardwise.rules.helpers.collectives import sum_grads_over
from shardwise.rules.registry import handler
from shardwise.torch_internals import (
    BackwardHookFunction,
    CheckpointFunction,
    Dirichlet,
    as_local,
)

# ---- backward and grad


@handler(torch.Tensor.backward)
def backward_of(func: Any, args: Args, kwargs: Kwargs) -> None:
    """Run `loss.backward(...)`."""

    def call(
        self: torch.Tensor,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        _backward([self], [gradient], retain_graph, create_graph, inputs)

    call(*args, **kwargs)


@handler(torch.autograd.backward)
def backward(func: Any, args: Args, kwargs: Kwargs) -> None:
    """Run `torch.autograd.backward(...)`."""

    def call(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        given = _as_list(tensors)
        seeds = [None] * len(given) if grad_tensors is None else _as_list(grad_tensors)
        _backward(given, seeds, retain_graph, create_graph, inputs)

    call(*args, **kwargs)


def _backward(
    tensors: Sequence[torch.Tensor],
    seeds: Sequence[Any],
    retain_graph: bool | None,
    create_graph: bool,
    inputs: Any,
) -> None:
    outputs, starts = _start(tensors, seeds)
    torch.autograd.backward(
        outputs,
        starts,
        retain_graph=retain_graph,
        create_graph=create_graph,
        inputs=None if inputs is None else _edges(_with_sources(_as_list(inputs))),
    )
    _mark_gradients_outdated()


def _mark_gradients_outdated() -> None:
    if linked.by_memory:
        mark_gradients_outdated("backward")


after_completion.append(_mark_gradients_outdated)


@handler(torch.autograd.grad)
def grad(func: Any, args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
    """Run `torch.autograd.grad(...)`: the gradient of a DTensor is a DTensor."""

    def call(
        outputs: Any, inputs: Any, grad_outputs: Any = None, **options: Any
    ) -> tuple[Any, ...]:
        given, wanted = _as_list(outputs), _as_list(inputs)
        seeds = [None] * len(given) if grad_outputs is None else _as_list(grad_outputs)
        if options.get("is_grads_batched"):
            raise LayoutError(
                "torch.autograd.grad: is_grads_batched is not supported for DTensors; "
                "call it once for each grad_outputs"
            )
        fills = options.pop("materialize_grads", False)
        if fills:
            options["allow_unused"] = True
        local, starts = _start(given, seeds)
        with suspended():
            if any(_source_of(each) is not None for each in wanted):
                return _grad_of_sources(local, wanted, starts, fills, options)
            found = torch.autograd.grad(local, _edges(wanted), starts, **options)
        return tuple(_gradient(value, of, fills) for value, of in zip(found, wanted, strict=True))

    return call(*args, **kwargs)


# ---- parameters that modules do not compute with: FSDP's shards


def _source_of(tensor: Any) -> torch.Tensor | None:
    """Return the tensor that modules compute with in the place of a parameter, if any."""
    known = getattr(tensor, GRADIENT_SOURCE, None)
    return None if known is None else known.source


def _with_sources(inputs: list[Any]) -> list[Any]:
    sources = [source for each in inputs if (source := _source_of(each)) is not None]
    return [*inputs, *sources]


def _grad_of_sources(
    outputs: list[torch.Tensor],
    wanted: list[Any],
    starts: list[torch.Tensor | None],
    fills: bool,
    options: dict[str, Any],
) -> tuple[Any, ...]:
    """Return gradients of inputs, of which some are computed from the gradients of other tensors:
    the sum of both, as users may compute with a parameter directly too."""
    allows_unused = options.pop("allow_unused", None) or fills
    edges = _edges(_with_sources(wanted))
    found = torch.autograd.grad(outputs, edges, starts, allow_unused=True, **options)
    direct = [_gradient(value, of, False) for value, of in zip(found, wanted, strict=False)]
    given = [getattr(each, GRADIENT_SOURCE) for each in wanted if _source_of(each) is not None]
    values = list(zip(given, found[len(wanted) :], strict=True))
    with torch.set_grad_enabled(bool(options.get("create_graph"))):
        reduced = iter(given[0].reduce(values))
        result = []
        for index, (each, value) in enumerate(zip(wanted, direct, strict=True)):
            if _source_of(each) is not None:
                other = next(reduced)
                value = other if value is None else value if other is None else value + other
            if value is None and not allows_unused:
                raise RuntimeError(
                    f"The differentiated Tensor at index {index} appears to not have been used in "
                    "the graph. Set allow_unused=True if this is the desired behavior."
                )
            result.append(torch.zeros_like(each) if value is None and fills else value)
    return tuple(result)


def _start(
    tensors: Sequence[torch.Tensor], seeds: Sequence[Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Return the local tensors from which a backward starts, and their gradients."""
    outputs: list[torch.Tensor] = []
    starts: list[torch.Tensor | None] = []
    for tensor, seed in zip(tensors, seeds, strict=True):
        if not isinstance(tensor, DTensor):
            outputs.append(tensor)
            starts.append(seed.full_tensor() if isinstance(seed, DTensor) else seed)
            continue
        with torch.enable_grad():  # it may be off here, as within a backward
            outputs.append(unwrap(tensor))
        starts.append(_seed(tensor, seed))
    return outputs, starts


def _seed(tensor: DTensor, seed: Any) -> torch.Tensor:
    layout = tensor._layout
    if any(op not in ("sum", "avg") for _, op in layout.partial):
        raise LayoutError(f"backward: a pending reduction of {layout!r} has no gradient")
    if seed is None:
        if layout.numel != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        with as_local():
            start = torch.ones_like(tensor, memory_format=torch.preserve_format)
    else:
        given = as_layout(seed, gradient_layout(layout), "gradient")
        start = unwrap(given) if isinstance(given, DTensor) else given
    # A replicated seed is used beside contributions in the graph: its own gradient is a sum.
    start = sum_grads_over(start, layout.mesh, [axis for axis, _ in layout.partial])
    averaged = math.prod(layout.mesh.shape[axis] for axis, op in layout.partial if op == "avg")
    return start / averaged if averaged > 1 else start


def _edges(inputs: Sequence[Any]) -> list[Any]:
    """Return the edges of the graph at which the gradients of inputs arrive.

    torch would dispatch the call again if it got DTensors. The call cannot run within `as_local()`
    either: Python code that runs in the graph must be dispatched.
    """
    with as_local():
        for each in inputs:
            if isinstance(each, DTensor):
                check_gradient(each, "inputs")
        return [get_gradient_edge(each) if isinstance(each, DTensor) else each for each in inputs]


def _gradient(value: torch.Tensor | None, of: Any, fills: bool) -> torch.Tensor | None:
    """Return a local gradient as a DTensor, if its tensor `of` is one."""
    if value is None and fills:
        return torch.zeros_like(of)
    if value is None or not isinstance(of, DTensor):
        return value
    with as_local():
        fresh = value.view_as(value) if type(value) is DTensor else value
    layout = of._layout
    if layout.partial and value.requires_grad:
        # Its own gradient is a pending sum.
        fresh = with_grad_layout(fresh, gradient_layout(layout), layout, is_exact=True)
    return wrap(fresh, gradient_layout(layout))


# ---- hooks


@handler(torch.Tensor.register_hook)
def register_hook(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run `tensor.register_hook(hook)`: the hook gets a DTensor, and may return one."""
    tensor, hook = (*args, *kwargs.values())
    layout = gradient_layout(tensor._layout)
    with as_local():
        check_gradient(tensor, "register_hook")

    def local_hook(gradient: torch.Tensor) -> torch.Tensor | None:
        with as_local():
            alias = gradient.view_as(gradient)
        result = hook(wrap(alias, layout))
        if result is None:
            return None
        moved = as_layout(result, layout, "the gradient that a hook returned")
        return unwrap(moved) if isinstance(moved, DTensor) else moved

    with as_local():
        return func(tensor, local_hook)


@handler(torch.Tensor.retain_grad)
def retain_grad(func: Any, args: Args, kwargs: Kwargs) -> None:
    """Run `tensor.retain_grad()`."""
    with as_local():
        check_gradient(args[0], "retain_grad")
        func(*args, **kwargs)


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return [value] if isinstance(value, torch.Tensor) or value is None else list(value)


# ---- custom autograd functions


def apply_to_dtensors(apply: Any, cls: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call a custom autograd function with DTensors among its arguments.

    Arguments:
        apply: torch's `cls.apply`.
        cls: the custom function.
    """
    args = tuple(arg.wait() if isinstance(arg, DTensor) else arg for arg in args)
    if cls is CheckpointFunction:
        return _as_dtensors(apply(*map(_with_local_gradient, args), **kwargs))
    if cls.__module__ == "torch.distributed.nn.functional":
        return on_local_tensors(f"{cls.__module__}.{cls.__name__}", apply, args, kwargs)
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if cls is BackwardHookFunction:
        layouts = [arg._layout if isinstance(arg, DTensor) else None for arg in tensors]
        return _as_dtensors(apply(*map(_with_local_gradient, args), **kwargs), layouts)
    mesh = common_mesh(cls.__name__, tensors)
    if cls is Dirichlet:  # also for Beta: how much it draws depends on the values
        tensors = [as_layout(arg, Layout(mesh, tuple(arg.shape)), "concentration") for arg in args]
        args = tuple(tensors)
    split = [arg for arg in tensors if isinstance(arg, DTensor) and not arg._layout.is_replicated]
    if split:
        raise DispatchError(
            f"{cls.__name__}.apply: got a DTensor {split[0]._layout!r}. A custom autograd function "
            "runs on local tensors, forward and backward: say how with "
            f"sw.local_map({cls.__name__}.apply, out_placements=..., in_placements=...)"
        )
    given = [unwrap(arg) if isinstance(arg, DTensor) else arg for arg in args]
    with as_local():
        result = apply(*given, **kwargs)
    return _as_replicated(result, mesh)


def _as_replicated(result: Any, mesh: DeviceMesh) -> Any:
    if isinstance(result, torch.Tensor):
        return wrap(result.view_as(result), Layout(mesh, tuple(result.shape)))
    if isinstance(result, tuple | list):
        return type(result)(_as_replicated(each, mesh) for each in result)
    return result


def _as_dtensors(result: Any, layouts: list[Layout | None] | None = None) -> Any:
    """Wrap results that are local tensors of known layouts; their gradients become DTensors."""
    many = isinstance(result, tuple | list)
    outputs = list(result) if many else [result]
    for at, each in enumerate(outputs):
        if not isinstance(each, torch.Tensor):
            continue
        layout = each._layout if isinstance(each, DTensor) else layouts[at] if layouts else None
        if layout is None:
            continue
        made = each if isinstance(each, DTensor) else wrap(each, layout)
        outputs[at] = made
        if made.requires_grad:
            with as_local():
                made.register_hook(_hook_to_dtensor(gradient_layout(layout)))  # type: ignore[no-untyped-call]
    if not many:
        return outputs[0]
    return type(result)(outputs)


def _with_local_gradient(arg: Any) -> Any:
    """Return an alias whose gradient becomes a local tensor, as all gradients in the graph are.

    The custom function and the user's hooks return DTensors, even ones of another layout.
    """
    if type(arg) is not DTensor or not (torch.is_grad_enabled() and arg.requires_grad):
        return arg
    layout = arg._layout
    with as_local():
        alias = arg.view_as(arg)
        alias.register_hook(_hook_to_local(gradient_layout(layout)))  # type: ignore[no-untyped-call]
    return wrap(alias, layout)


def _hook_to_local(layout: Layout) -> Any:
    def hook(gradient: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(gradient, DTensor):
            return None
        made = as_layout(gradient, layout, "gradient")
        return unwrap(made)  # type: ignore[arg-type]

    return hook


def _hook_to_dtensor(layout: Layout) -> Any:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        with as_local():
            return wrap(gradient.view_as(gradient), layout)

    return hook
