"""Operators on a rank that is outside of the mesh of its DTensors.

Such a rank has no data, and takes no part in any collective. It runs the operator on meta tensors,
as a stand-in for the first rank of the mesh: so its results have the shapes, dtypes and layouts
that the ranks of the mesh find. Python values that need data are zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from shardwise.comm import standing_in
from shardwise.core.errors import DispatchError, ShardwiseError, also
from shardwise.core.tensor_state import ensure_state
from shardwise.dispatch import autograd, collectives, scalars
from shardwise.dtensor.call_args import Args, Kwargs
from shardwise.dtensor.kinds import OutsideDTensor
from shardwise.dtensor.tensor import DTensor, tensors_in, wrap
from shardwise.redistribute.plan import gradient_layout
from shardwise.rules.registry import lookup, name_of
from shardwise.torch_internals import TensorBase, as_local, version_of

_Tensor = torch.Tensor


def dispatch_outside(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """Run a torch function on DTensors without data, as their `__torch_function__`."""
    kwargs = kwargs or {}
    known = lookup(func)
    special = None if known is None else _SPECIAL.get(known.handler)
    if special is not None:
        return special(func, args, kwargs)
    if func in _ON_LOCAL:
        return _on_local(func, args, kwargs)
    return _run_on_meta(func, args, kwargs)


def _run_on_meta(func: Any, args: Args, kwargs: Kwargs) -> Any:
    given = list(tensors_in((args, kwargs)))
    mesh = next(each for each in given if isinstance(each, OutsideDTensor))._layout.mesh
    try:
        with standing_in(mesh):
            metas = {id(each): _as_meta(each) for each in given}
            as_meta: Callable[[Any], Any] = lambda each: metas[id(each)]  # noqa: E731
            result = func(*_mapped(args, as_meta), **_mapped(kwargs, as_meta))
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, ShardwiseError) or "meta" not in str(error).lower():
            raise
        raise also(DispatchError, type(error))(
            f"{name_of(func)}: its result depends on the values of a DTensor on {mesh!r}, which "
            "this rank is not in: it has no data. Call it on the ranks of the mesh only, if "
            "mesh.get_coordinate() is not None"
        ) from error
    originals = {id(metas[id(each)]): each for each in given}

    def as_outside(value: torch.Tensor) -> torch.Tensor:
        original = originals.get(id(value))
        needs_grad = value.requires_grad
        if not isinstance(value, DTensor):
            if original is None:
                return torch.empty(0, dtype=value.dtype, device=given[0].device)
            return original
        with torch.set_grad_enabled(needs_grad):
            made = OutsideDTensor.of(value._layout, *given, dtype=value.dtype)
        if original is None:
            ensure_state(made).stand_in = value  # it knows what was reduced of it, as on the mesh
            return made
        original._layout = value._layout  # type: ignore[attr-defined]
        if needs_grad and not (original.is_leaf and original.requires_grad):  # written to in place
            with as_local():
                original.add_(made)
        return original

    return _mapped(result, as_outside)


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor of the same shape and layout, as the first rank of the mesh has it."""
    if not isinstance(tensor, OutsideDTensor):
        if isinstance(tensor, DTensor):
            return tensor  # of another mesh: refused by dispatch, as on the ranks of the mesh
        return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)
    notes = ensure_state(tensor)
    layout = tensor._layout
    if notes.stand_in is None or notes.stand_in._layout is not layout:
        local = torch.empty(layout.local_shape(), dtype=tensor.dtype, device="meta")
        notes.stand_in = wrap(local, layout)
    made: DTensor = notes.stand_in
    if made.is_leaf and made.requires_grad != tensor.requires_grad:
        made.requires_grad_(tensor.requires_grad)
    return made


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Replace the tensors in arguments or results."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _mapped(each, change) for name, each in value.items()}
    if isinstance(value, list | tuple):
        parts = [_mapped(each, change) for each in value]
        if isinstance(value, list):
            return parts
        kind: Any = type(value)  # torch's named tuples take one sequence, Python's an argument each
        return kind(*parts) if hasattr(value, "_fields") else kind(parts)
    return value


# ---- functions that need data, or the graph


def _value(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Convert to a Python value or an array: 0, or nothing."""

    def nothing(each: torch.Tensor) -> torch.Tensor:
        if not isinstance(each, OutsideDTensor):
            return each
        return torch.zeros(() if each.numel() == 1 else (0,), dtype=each.dtype)

    with as_local():
        return func(*_mapped(args, nothing), **kwargs)


def _refuse_to_send(func: Any, args: Args, kwargs: Kwargs) -> None:
    for each in tensors_in((args, kwargs)):
        if isinstance(each, OutsideDTensor):
            collectives.check_inside(name_of(func), each._layout)


def _backward(func: Any, args: Args, kwargs: Kwargs) -> None:
    """Run a backward through the graph of tensors without data: all gradients are zeros."""
    roots = _as_list(args[0])
    with as_local():
        torch.autograd.backward(roots, [torch.zeros_like(each) for each in roots])


def _grad(func: Any, args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
    outputs, inputs = map(_as_list, args[:2])
    options = {name: value for name, value in kwargs.items() if name != "grad_outputs"}
    with as_local():
        seeds = [torch.zeros_like(each) for each in outputs]
        found = torch.autograd.grad(outputs, inputs, seeds, **options)
    return tuple(
        OutsideDTensor.of(gradient_layout(of._layout), each)
        if isinstance(of, OutsideDTensor) and each is not None
        else each
        for each, of in zip(found, inputs, strict=True)
    )


def _as_list(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _on_local(func: Any, args: Args, kwargs: Kwargs) -> Any:
    with as_local():
        return func(*args, **kwargs)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    scalars.run_on_whole: _value,
    collectives.run_as_torch_does: _refuse_to_send,
    collectives.run_functional: _refuse_to_send,
    collectives.refuse_operator: _refuse_to_send,
    autograd.backward_of: _backward,
    autograd.backward: _backward,
    autograd.grad: _grad,
    autograd.register_hook: _on_local,
    autograd.retain_grad: _on_local,
}
"""What replaces the handlers of functions that need data, ranks or the graph."""

_ON_LOCAL = {
    _Tensor.requires_grad_,
    TensorBase.is_leaf.__get__,
    TensorBase.grad_fn.__get__,
    TensorBase.retains_grad.__get__,
    TensorBase.output_nr.__get__,
    TensorBase.is_meta.__get__,
    TensorBase.is_cpu.__get__,
    TensorBase.is_cuda.__get__,
    version_of,
    torch.equal,
    _Tensor.equal,
    torch.allclose,
    _Tensor.allclose,
}
"""Functions that run on the local tensors: about the graph of autograd and devices; comparisons, as
empty tensors are equal."""

OutsideDTensor.__torch_function__ = MethodType(dispatch_outside, OutsideDTensor)  # type: ignore[method-assign]
