"""backward, grad and hooks: autograd works on the local tensors, the user sees DTensors.

The gradient of a DTensor lies as it does, with pending sums made whole (`dual`). A loss that is a
pending sum needs no reduction to start from: each contribution's gradient is the loss's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from shardwise.copies import linked, outdate_gradients
from shardwise.dispatch.moving import check_gradient
from shardwise.errors import LayoutError
from shardwise.redistribute.autograd import relabelled
from shardwise.redistribute.plan import dual
from shardwise.rules.collectives import used
from shardwise.rules.registry import handler
from shardwise.tensor import DTensor, laid_out, unwrap, wrap
from shardwise.torch_internals import as_local


@handler(torch.Tensor.backward)
def backward_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`loss.backward(...)`."""

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
def backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`torch.autograd.backward(...)`."""

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
    outputs, starts = _started(tensors, seeds)
    torch.autograd.backward(
        outputs,
        starts,
        retain_graph=retain_graph,
        create_graph=create_graph,
        inputs=None if inputs is None else _edges(_as_list(inputs)),
    )
    if linked.by_memory:
        outdate_gradients("backward")


@handler(torch.autograd.grad)
def grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """`torch.autograd.grad(...)`: DTensors for DTensors."""

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
        local, starts = _started(given, seeds)
        found = torch.autograd.grad(local, _edges(wanted), starts, **options)
        return tuple(_gradient(value, of, fills) for value, of in zip(found, wanted, strict=True))

    return call(*args, **kwargs)


def _started(
    tensors: Sequence[torch.Tensor], seeds: Sequence[Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The local tensors to start from, and their gradients."""
    outputs: list[torch.Tensor] = []
    starts: list[torch.Tensor | None] = []
    for tensor, seed in zip(tensors, seeds, strict=True):
        if not isinstance(tensor, DTensor):
            outputs.append(tensor)
            starts.append(seed.full_tensor() if isinstance(seed, DTensor) else seed)
            continue
        with torch.enable_grad():  # also where it is off, as within a backward
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
        given = laid_out(seed, dual(layout), "gradient")
        start = unwrap(given) if isinstance(given, DTensor) else given
    # What is whole is used beside contributions in the graph: its own gradient is a sum.
    start = used(start, layout.mesh, [axis for axis, _ in layout.partial])
    averaged = math.prod(layout.mesh.shape[axis] for axis, op in layout.partial if op == "avg")
    return start / averaged if averaged > 1 else start


def _edges(inputs: Sequence[Any]) -> list[Any]:
    """The places in the graph where gradients of inputs arrive. Were DTensors handed to torch, it
    would ask this module again; and while the graph runs, Python code in it must be dispatched."""
    with as_local():
        for each in inputs:
            if isinstance(each, DTensor):
                check_gradient(each, "inputs")
        return [get_gradient_edge(each) if isinstance(each, DTensor) else each for each in inputs]


def _gradient(value: torch.Tensor | None, of: Any, fills: bool) -> torch.Tensor | None:
    """A local gradient as a DTensor, if what it is of is one."""
    if value is None and fills:
        return torch.zeros_like(of)
    if value is None or not isinstance(of, DTensor):
        return value
    with as_local():
        fresh = value.view_as(value) if type(value) is DTensor else value
    layout = of._layout
    if layout.partial and value.requires_grad:
        fresh = relabelled(fresh, dual(layout), layout)  # its gradient is pending, as `of` is
    return wrap(fresh, dual(layout))


@handler(torch.Tensor.register_hook)
def register_hook(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`tensor.register_hook(hook)`: the hook is handed a DTensor, and may return one."""
    tensor, hook = (*args, *kwargs.values())
    layout = dual(tensor._layout)
    with as_local():
        check_gradient(tensor, "register_hook")

    def local_hook(gradient: torch.Tensor) -> torch.Tensor | None:
        with as_local():
            alias = gradient.view_as(gradient)
        result = hook(wrap(alias, layout))
        if result is None:
            return None
        moved = laid_out(result, layout, "the gradient that a hook returned")
        return unwrap(moved) if isinstance(moved, DTensor) else moved

    with as_local():
        return func(tensor, local_hook)


@handler(torch.Tensor.retain_grad)
def retain_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`tensor.retain_grad()`."""
    with as_local():
        check_gradient(args[0], "retain_grad")
        func(*args, **kwargs)


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return [value] if isinstance(value, torch.Tensor) or value is None else list(value)
