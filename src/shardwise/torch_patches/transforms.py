"""The transforms of torch.func (vmap, grad, vjp, jvp, ...) with DTensors.

The transforms wrap their inputs in C++, where a DTensor is only its shard. A DTensor that is whole
on every rank is such a tensor: it enters as a plain one, and every rank computes the same. A split
or pending one is refused. Inside of a transform a wrapped tensor may meet DTensors that the
function has from elsewhere, as the parameters of a model: the same holds for them. Results are
plain tensors.

Dispatch knows nothing of this and pays nothing for it: while some transform runs, and only then,
`DTensor.__torch_function__` is another function.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from shardwise.core.errors import DispatchError
from shardwise.core.layout import Layout
from shardwise.dtensor.tensor import DTensor, tensors_in, unwrap
from shardwise.dtensor.writes import is_split
from shardwise.rules.registry import name_of
from shardwise.torch_internals import (
    inside_of_transform,
    is_transformed,
    transforms_module,
    vmap_module,
    wrap_functional,
)
from shardwise.torch_patches.patch import Undo, replace, undo_all


def take_whole_inputs() -> Undo:
    """Let whole DTensors enter transforms as plain tensors, and refuse others."""
    places = [
        (vmap_module, "_add_batch_dim"),
        (transforms_module, "_wrap_for_grad"),
        (transforms_module, "_wrap_functional_tensor"),
    ]
    return undo_all(
        [replace(module, name, _entering(getattr(module, name))) for module, name in places]
    )


def _entering(wrapping: Any) -> Any:
    @functools.wraps(wrapping)
    def wrapped(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return wrapping(tensor, *args, **kwargs)
        plain = _as_plain(tensor)
        if wrapping is wrap_functional:
            raise DispatchError(
                f"torch.func: got a DTensor {tensor._layout!r}. functionalize needs the very "
                "tensor that it is given; give it x.full_tensor()"
            )
        return wrapping(plain, *args, **kwargs)

    return wrapped


def _as_plain(tensor: DTensor) -> torch.Tensor:
    layout: Layout = tensor._layout
    if is_split(layout) or layout.partial:
        raise DispatchError(
            f"torch.func: got a DTensor {layout!r}. Its transforms (grad, vjp, jvp, vmap, ...) "
            "would see only this rank's piece; use torch.autograd.grad or "
            "torch.autograd.functional, "
            "transform local tensors within sw.local_map, or make it whole: "
            "x.redistribute(placements=[Replicate(), ...])"
        )
    plain = unwrap(tensor)
    while is_transformed(plain):  # an alias that is made within a transform is its result
        plain = inside_of_transform(plain)
    return plain


# ---- within a transform


class _TransformDepth(threading.local):
    """The number of transforms that run on this thread."""

    depth = 0


class _TransformDispatch:
    """Chooses how functions on DTensors run.

    Arguments:
        dispatch: runs them outside of transforms.
    """

    def __init__(self, dispatch: Callable[..., Any]) -> None:
        self.count = 0
        """The number of transforms that run in this process."""
        self.lock = threading.Lock()
        self.here = _TransformDepth()
        self.dispatch = dispatch

    def add(self, number: int) -> None:
        """Note that a transform begins (1) or ends (-1) on this thread."""
        self.here.depth += number
        with self.lock:
            self.count += number
            chosen = self.dispatch_in_transform if self.count else self.dispatch
            DTensor.__torch_function__ = MethodType(chosen, DTensor)  # type: ignore[method-assign]

    def dispatch_in_transform(
        self, cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function on plain tensors if a transform has wrapped some tensor, or does now."""
        keywords = kwargs or {}
        is_inside = self.here.depth and (
            any(map(is_transformed, tensors_in((args, keywords)))) or name_of(func) == "_make_dual"
        )
        if not is_inside:
            return self.dispatch(cls, func, types, args, keywords)
        return func(
            *map(_with_plain, args), **{name: _with_plain(each) for name, each in keywords.items()}
        )


def _with_plain(value: Any) -> Any:
    """Return an argument with plain tensors in place of whole DTensors."""
    if isinstance(value, DTensor):
        return _as_plain(value)
    if isinstance(value, list | tuple):
        parts = [_with_plain(each) for each in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def dispatch_in_transforms() -> Undo:
    """Change how functions on DTensors run while a transform does."""
    chosen = _TransformDispatch(DTensor.__torch_function__.__func__)  # type: ignore[attr-defined]

    def noted(change: Any, number: int) -> Any:
        @functools.wraps(change)
        def changed(*args: Any, **kwargs: Any) -> Any:
            chosen.add(number)
            return change(*args, **kwargs)

        return changed

    # Not the contexts that call these: torch.compile knows the contexts by identity.
    places = [(vmap_module, "_vmap"), (transforms_module, "_grad"), (transforms_module, "_jvp")]
    return undo_all(
        [
            replace(module, name, noted(getattr(module, name), number))
            for module, kind in places
            for name, number in (
                (f"{kind}_increment_nesting", 1),
                (f"{kind}_decrement_nesting", -1),
            )
        ]
    )
