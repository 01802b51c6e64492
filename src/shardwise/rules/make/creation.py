"""New tensors made like another one, and tensors overwritten by one value or a Python function."""

from __future__ import annotations

import operator
from typing import Any

import torch

from shardwise.core.errors import DispatchError
from shardwise.core.layout import Layout
from shardwise.dtensor.local_shards import shard_stride
from shardwise.dtensor.tensor import DTensor, wrap
from shardwise.dtensor.writes import check_writable
from shardwise.rules.helpers.dims import unsplit_spec
from shardwise.rules.registry import handler, name_of, rule
from shardwise.rules.spec import Spec
from shardwise.torch_internals import as_local


def _numbers(args: Any) -> list[Any]:
    """Replace DTensors among arguments: 0-d ones by numbers, others by whole plain tensors."""
    return [_number(each) for each in args]


def _number(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor() if value.dim() else value.item()
    if type(value) in (list, tuple):
        return type(value)(map(_number, value))
    return value


def check_layout(name: str, layout: torch.layout | None) -> None:
    """Refuse sparse layouts."""
    if layout not in (None, torch.strided):
        raise DispatchError(
            f"{name}(layout): expected torch.strided, as a DTensor is dense; got {layout}"
        )


@handler("zeros_like", "ones_like", "full_like", "empty_like")
def like(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a tensor in the layout of the model, but replicated where the model is pending a
    sum."""
    model, *rest = args or (kwargs["input"],)
    rest = _numbers(rest)
    keywords = {
        name: each if name == "input" else _numbers([each])[0] for name, each in kwargs.items()
    }
    check_layout(name_of(func), keywords.get("layout"))
    if not isinstance(model, DTensor):
        return func(*([model] if args else []), *rest, **keywords)
    layout = model._layout
    with as_local():
        local = func(*([model] if args else []), *rest, **keywords)
    return wrap(local, layout.relaid(partial={}) if layout.partial else layout)


@handler("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
def new_of_size(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a tensor on the mesh of the model: of the model's shape, in its layout, but replicated
    where the model is pending a sum; of another shape, replicated."""
    model, *rest = args
    rest = _numbers(rest)
    keywords = dict(zip(kwargs, _numbers(kwargs.values()), strict=True))
    name = name_of(func)
    check_layout(name, keywords.get("layout"))
    if not isinstance(model, DTensor) or not (rest or "size" in keywords):
        return func(model, *rest, **keywords)
    layout = model._layout
    size, others = _split_size(rest, keywords)
    target = layout.relaid(partial={}) if size == layout.shape else Layout(layout.mesh, size)
    if name == "new_empty_strided" and not target.is_replicated:
        strides, others = _first_of(others, keywords, "stride")
        local_strides = shard_stride(target, strides)
        if local_strides is None:  # strides with gaps, which pieces cannot have
            target, local_strides = Layout(layout.mesh, size), strides
        others = [local_strides, *others]
    with as_local():
        return wrap(func(model, target.local_shape(), *others, **keywords), target)


def _split_size(rest: list[Any], keywords: dict[str, Any]) -> tuple[tuple[int, ...], list[Any]]:
    """Return the size that a call asks for, and its other positional arguments."""
    if "size" in keywords or (rest and isinstance(rest[0], list | tuple)):
        size, others = _first_of(rest, keywords, "size")
    else:  # new_zeros(2, 3); new_full and new_empty_strided take no sizes one by one
        size, others = rest, []
    return tuple(map(operator.index, size)), others


def _first_of(rest: list[Any], keywords: dict[str, Any], name: str) -> tuple[Any, list[Any]]:
    """Take an argument that is the first of the positional ones, or given by name."""
    return (keywords.pop(name), rest) if name in keywords else (rest[0], rest[1:])


@handler("new_tensor", "new")
def new(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a replicated tensor on the mesh of the model."""
    model, *rest = args
    rest = _numbers(rest)
    keywords = dict(zip(kwargs, _numbers(kwargs.values()), strict=True))
    check_layout(name_of(func), keywords.get("layout"))
    with as_local():
        local = func(model, *rest, **keywords)
    if not isinstance(model, DTensor):
        return local
    return wrap(local, Layout(model._layout.mesh, tuple(local.shape)))


@rule("linspace", "logspace", inplace=False)
def spaced(start: Any, end: Any, steps: int, *args: Any, **kwargs: Any) -> Spec:
    """Make a replicated result; bounds that are tensors are replicated, too."""
    return unsplit_spec([each for each in (start, end) if isinstance(each, torch.Tensor)], (steps,))


@handler("zero_")
def zero_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (target,) = (*args, *kwargs.values())
    check_writable("zero_", target)
    with as_local():
        func(target)
    return target


@handler("fill_")
def fill_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fill the target in its layout; pending contributions are set so that they reduce to the
    value."""
    target, value = (*args, *kwargs.values())
    if isinstance(value, torch.Tensor):
        if value.dim() > 0:
            raise RuntimeError(
                "fill_ only supports 0-dimension value tensor but got tensor with "
                f"{value.dim()} dimensions."
            )
        return target.copy_(value)
    check_writable("fill_", target)
    with as_local():
        func(target, contribution_of(target._layout, value))
    return target


@handler("fill")
def fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    model, value = (*args, *kwargs.values())
    return model.clone().fill_(
        value
    )  # a copy, so that the gradient of the overwritten values is zero


@handler("apply_", "map_", "map2_")
def apply_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function for each element of this rank's shard."""
    name = name_of(func)
    target, *others, function = (*args, *kwargs.values())
    if not isinstance(target, DTensor) or target._layout.partial:
        raise DispatchError(
            f"{name}: expected a DTensor of values to write to, got "
            f"{repr(target._layout) if isinstance(target, DTensor) else 'a plain tensor'}; "
            "x.redistribute() makes pending contributions values, and full_tensor() or to_local() "
            "of a DTensor goes beside plain tensors"
        )
    check_writable(name, target)
    alike = [torch.empty_like(target, dtype=each.dtype).copy_(each) for each in others]
    with as_local():
        func(target, *alike, function)
    return target


def contribution_of(layout: Layout, value: Any) -> Any:
    """Return this rank's contribution to a pending reduction that gives `value`."""
    place = layout.mesh.get_coordinate() or (0,) * layout.mesh.ndim
    for axis, op in layout.partial:
        if op in ("sum", "product") and place[axis] > 0:
            return 0 if op == "sum" else 1
    return value
