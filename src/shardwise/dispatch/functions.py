"""Custom autograd functions: they bypass `__torch_function__`, so they are met at `apply`.

The forward of a custom function would see DTensors, and its backward plain local gradients: that
mixture has no meaning. So a function that is handed DTensors runs on the whole tensors if they are
whole, and is refused otherwise. Three of torch's own are known: two hand tensors through, and one
samples, for which its input is made whole.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._functorch import eager_transforms, vmap
from torch.distributions.dirichlet import _Dirichlet
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils.checkpoint import (
    CheckpointFunction,
    _allowed_determinism_checks_to_fns,
    _CheckpointFrame,
    _default_meta_extractor,
)

from shardwise.copies import as_ordinary, copies_in
from shardwise.dispatch.arguments import common_mesh
from shardwise.errors import DispatchError
from shardwise.layout import Layout
from shardwise.redistribute.plan import dual
from shardwise.tensor import DTensor, as_local, laid_out, unwrap, wrap

_function_apply: Any = torch.autograd.Function.__dict__["apply"]


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    return _function_apply.__get__(None, cls)(*args, **kwargs)


def guarded_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.Function.apply`, with an eye on DTensors."""
    for arg in args:
        if isinstance(arg, DTensor):
            if torch._C._is_torch_function_enabled():
                run = functools.partial(_apply_to_dtensors, cls, args, kwargs)
                return as_ordinary(copies_in(args, kwargs), run)
            break
    return _apply(cls, *args, **kwargs)


torch.autograd.Function.apply = classmethod(guarded_apply)  # type: ignore[assignment,method-assign]


# The transforms of torch.func wrap their inputs in C++, where a DTensor is only its shard.


def _guarded_wrapping(wrapping: Any) -> Any:
    @functools.wraps(wrapping)
    def wrapped(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, DTensor):
            raise DispatchError(
                f"torch.func: got a DTensor {tensor._layout!r}. Its transforms (grad, vjp, jvp, "
                "vmap, ...) would see only this rank's piece; use torch.autograd.grad or "
                "torch.autograd.functional, or transform local tensors within sw.local_map"
            )
        return wrapping(tensor, *args, **kwargs)

    return wrapped


for _module, _name in (
    (vmap, "_add_batch_dim"),
    (eager_transforms, "_wrap_for_grad"),
    (eager_transforms, "_wrap_functional_tensor"),
):
    setattr(_module, _name, _guarded_wrapping(getattr(_module, _name)))


def _local_metadata(tensor: torch.Tensor) -> Any:
    """What checkpointing compares: it looks at saved tensors within `as_local()`, at recomputed
    ones without, and both must mean the shard."""
    with as_local():
        return _default_meta_extractor(tensor)


_allowed_determinism_checks_to_fns["default"] = _local_metadata


_save_inputs = _CheckpointFrame.save_inputs


def _save_renewed(self: Any, *args: Any) -> None:
    """What checkpointing calls with its arguments, before it runs: they must not change within."""
    for each in copies_in(args):
        each._renew()
    _save_inputs(self, *args)  # type: ignore[no-untyped-call]


_CheckpointFrame.save_inputs = _save_renewed  # type: ignore[method-assign]


def _apply_to_dtensors(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if cls is CheckpointFunction:
        return _retyped(_apply(cls, *map(_entering, args), **kwargs))
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if cls is BackwardHookFunction:
        layouts = [arg._layout if isinstance(arg, DTensor) else None for arg in tensors]
        return _retyped(_apply(cls, *map(_entering, args), **kwargs), layouts)
    mesh = common_mesh(cls.__name__, tensors)
    if cls is _Dirichlet:  # also of Beta: it draws as much as the data needs
        tensors = [laid_out(arg, Layout(mesh, tuple(arg.shape)), "concentration") for arg in args]
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
        result = _apply(cls, *given, **kwargs)
    return _wrapped_whole(result, mesh)


def _wrapped_whole(result: Any, mesh: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return wrap(result.view_as(result), Layout(mesh, tuple(result.shape)))
    if isinstance(result, tuple | list):
        return type(result)(_wrapped_whole(each, mesh) for each in result)
    return result


def _retyped(result: Any, layouts: list[Layout | None] | None = None) -> Any:
    """Results that are local tensors of known layouts; their gradients arrive as DTensors too."""
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
                made.register_hook(_as_dtensor(dual(layout)))  # type: ignore[no-untyped-call]
    if not many:
        return outputs[0]
    return type(result)(outputs)


def _entering(arg: Any) -> Any:
    """An alias whose gradient goes on as a local tensor, as all others in the graph are.

    These functions, and hooks of the user's, return DTensors, which may even lie otherwise.
    """
    if type(arg) is not DTensor or not (torch.is_grad_enabled() and arg.requires_grad):
        return arg
    layout = arg._layout
    with as_local():
        alias = arg.view_as(arg)
        alias.register_hook(_as_local_gradient(dual(layout)))  # type: ignore[no-untyped-call]
    return wrap(alias, layout)


def _as_local_gradient(layout: Layout) -> Any:
    def hook(gradient: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(gradient, DTensor):
            return None
        made = laid_out(gradient, layout, "gradient")
        return unwrap(made)  # type: ignore[arg-type]

    return hook


def _as_dtensor(layout: Layout) -> Any:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        with as_local():
            return wrap(gradient.view_as(gradient), layout)

    return hook
