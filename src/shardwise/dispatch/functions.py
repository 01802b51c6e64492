"""Custom autograd functions: they bypass `__torch_function__`, so `torch_patches` guards `apply`.

The forward of a custom function would see DTensors, and its backward plain local gradients: that
mixture has no meaning. So a function that is handed DTensors runs on the whole tensors if they are
whole, and is refused otherwise. Three of torch's own are known: two hand tensors through, and one
samples, for which its input is made whole.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.dispatch.arguments import common_mesh
from shardwise.errors import DispatchError
from shardwise.layout import Layout
from shardwise.redistribute.plan import dual
from shardwise.tensor import DTensor, laid_out, unwrap, wrap
from shardwise.torch_internals import (
    BackwardHookFunction,
    CheckpointFunction,
    Dirichlet,
    as_local,
)


def apply_to_dtensors(apply: Any, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a custom autograd function on arguments of which some are DTensors.

    Arguments:
        apply: torch's `cls.apply`.
    """
    if cls is CheckpointFunction:
        return _retyped(apply(*map(_entering, args), **kwargs))
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if cls is BackwardHookFunction:
        layouts = [arg._layout if isinstance(arg, DTensor) else None for arg in tensors]
        return _retyped(apply(*map(_entering, args), **kwargs), layouts)
    mesh = common_mesh(cls.__name__, tensors)
    if cls is Dirichlet:  # also of Beta: it draws as much as the data needs
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
        result = apply(*given, **kwargs)
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
