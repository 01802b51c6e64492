"""torch._foreach_*: one call for many tensors, as optimizers use it.

If the tensors at each position of all lists have the same layout, with no pending reduction, one
torch call on the shards is enough. Otherwise the ordinary operator runs for each position.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch

from shardwise.core.layout import Layout
from shardwise.dtensor.tensor import DTensor, redistribute_to
from shardwise.dtensor.writes import check_writable
from shardwise.rules.pointwise.elementwise import names
from shardwise.rules.registry import handler
from shardwise.torch_internals import as_local

_layout_of = attrgetter("_layout")
_Tensor = torch.Tensor


def aligned(args: Any) -> list[Layout] | None:
    """Return the layouts of the tensors at each position, if they are the same in all lists.

    None if they differ or a reduction is pending. Lists of numbers and single replicated tensors
    are ignored.
    """
    layouts: list[Layout] | None = None
    for arg in args:
        kind = type(arg)
        if kind is list or kind is tuple:
            if not arg or not isinstance(arg[0], _Tensor):
                continue
            try:
                found = list(map(_layout_of, arg))
            except AttributeError:  # a plain tensor among them
                return None
            if layouts is None:
                layouts = found
            elif layouts != found:
                return None
        elif isinstance(arg, _Tensor) and not _is_constant(arg):
            return None
    if layouts is None or _is_pending(tuple(layouts)):
        return None
    return layouts


@lru_cache(maxsize=1024)
def _is_pending(layouts: tuple[Layout, ...]) -> bool:
    return any(layout.partial for layout in layouts)


def _is_constant(tensor: torch.Tensor) -> bool:
    """Return whether a single tensor beside the lists can be used without moving it."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return False
    return not isinstance(tensor, DTensor) or tensor._layout.is_replicated


# ---- pointwise


def inplace(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a call that writes to the tensors of the first list."""
    if aligned((*args, *kwargs.values()) if kwargs else args) is None:
        return inplace_one_by_one(func, args, kwargs)
    for target in args[0]:
        check_writable(func.__name__, target)
    with as_local():
        return func(*args, **kwargs)


def inplace_one_by_one(func: Any, args: Any, kwargs: Any) -> Any:
    """Run it position by position, so that each sees the writes of the ones before."""
    _one_by_one(func, args, kwargs)
    return args[0]


def _outplace(func: Any, args: Any, kwargs: Any) -> Any:
    layouts = aligned((*args, *kwargs.values()) if kwargs else args)
    if layouts is None:
        return _one_by_one(func, args, kwargs)
    with as_local():
        results = func(*args, **kwargs)
    for result, layout in zip(results, layouts, strict=True):
        result.__class__ = DTensor
        result._layout = layout
    return results


def _one_by_one(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Run the ordinary operator for each position."""
    operator = _ordinary(func.__name__.removeprefix("_foreach_"))
    keywords = {name: each for name, each in kwargs.items() if name in ("alpha", "value")}
    args = [*args, *(each for name, each in kwargs.items() if name not in keywords)]
    if "addc" in func.__name__ and len(args) == 4:
        value = args.pop()
        keywords["value"] = value.tolist() if isinstance(value, _Tensor) else value
    lists = [each for each in (*args, *keywords.values()) if isinstance(each, list | tuple)]
    count = len(lists[0])
    for each in lists:
        if len(each) != count:
            raise RuntimeError(
                f"Tensor lists must have the same number of tensors, got {count} and {len(each)}"
            )

    def at(arg: Any, position: int) -> Any:
        return arg[position] if isinstance(arg, list | tuple) else arg

    return tuple(
        operator(
            *(at(arg, position) for arg in args),
            **{name: at(arg, position) for name, arg in keywords.items()},
        )
        for position in range(count)
    )


@lru_cache
def _ordinary(name: str) -> Callable[..., Any]:
    """Return the operator on one tensor."""
    for foreach, ordinary in (("maximum", "clamp_min"), ("minimum", "clamp_max")):
        if name.startswith(foreach):  # of a tensor or a number
            name = name.replace(foreach, ordinary)
    if name == "pow":  # the base may be a number
        return torch.pow
    return getattr(torch.Tensor, name)  # type: ignore[no-any-return]


POINTWISE = names("""
    abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min cos cosh div erf erfc exp expm1
    floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt
    sigmoid sign sin sinh sqrt sub tan tanh trunc
""")

handler(*(f"_foreach_{name}" for name in POINTWISE), "_foreach_clone")(_outplace)
handler(*(f"_foreach_{name}_" for name in [*POINTWISE, "zero", "copy"]))(inplace)


@handler("_foreach_max", "_foreach_mm")
def one_by_one(func: Any, args: Any, kwargs: Any) -> Any:
    return _one_by_one(func, args, kwargs)


# ---- fused optimizers


@handler("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
def fused(func: Any, args: Any, kwargs: Any) -> None:
    """Run in the parameters' layouts; other tensors are moved there, updated, and copied back."""
    keywords = {name: _as_whole(arg) for name, arg in kwargs.items()}
    lists = [arg for arg in args if arg and isinstance(arg[0], DTensor)]
    for parameter in args[0]:
        check_writable(func.__name__, parameter)
    if aligned(lists) is not None:
        with as_local():
            func(*args, **keywords)
        return
    moved: list[tuple[DTensor, DTensor]] = []
    given = [
        [
            _like_parameter(each, parameter, moved)
            for each, parameter in zip(arg, args[0], strict=False)
        ]
        for arg in args
    ]
    with as_local():
        func(*given, **keywords)
    for tensor, updated in moved:
        tensor.copy_(updated)


def _as_whole(arg: Any) -> Any:
    """Return a single tensor beside the lists, gathered if it is split or pending."""
    if isinstance(arg, DTensor) and not arg._layout.is_replicated:
        return arg.full_tensor()
    return arg


def _like_parameter(tensor: Any, parameter: Any, moved: list[Any]) -> Any:
    """Return a tensor in the layout of the parameter without pending reductions."""
    if not isinstance(parameter, DTensor):
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    layout = parameter._layout.relaid(partial={})
    if not isinstance(tensor, DTensor):
        if tensor.dim() == 0 and layout.ndim > 0:
            return tensor  # the number of steps
        tensor = DTensor.from_local(tensor, layout.mesh)
    if tensor._layout is layout:
        return tensor
    made = redistribute_to(tensor, layout)
    moved.append((tensor, made))
    return made
