"""Writes through views, such as `buffer[2:5] = x` in programs as they are exported.

Where a view's dim is split it is a copy: what it is a view of is written to by index instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from shardwise.dispatch.entry import mark_severed
from shardwise.export.cleaning import writes
from shardwise.export.errors import ExportError
from shardwise.tensor import DTensor, as_local, severed_by

_aten: Any = torch.ops.aten


class _Unread:
    """Stands for a view that is only written to, all of it: it is not made."""


UNREAD = _Unread()


def is_unread(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    """Whether a node is a part of a split tensor that somebody writes to, and nobody reads."""
    if _key(node) is None or not isinstance(values.get(node.args[0]), DTensor):  # type: ignore[arg-type]
        return False
    if values[node.args[0]]._layout.is_replicated or len(node.users) != 1:  # type: ignore[index]
        return False
    (user,) = node.users
    is_written = user.target is _aten.copy_.default and user.args[0] is node
    return is_written and user.args[1] is not node and not user.users


def is_apart(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    """Whether a node writes to a view that is none."""
    target = node.args[0] if writes(node) and node.args else None
    return isinstance(target, fx.Node) and _is_copy(values.get(target))


def _is_copy(value: Any) -> bool:
    with as_local():
        return value is UNREAD or (isinstance(value, DTensor) and severed_by(value) is not None)


def write(
    node: fx.Node, values: dict[fx.Node, Any], args: tuple[Any, ...], run: Callable[..., Any]
) -> Any:
    """What a node that writes to a view returns; the tensor it is a view of is written to.

    Arguments:
        values: of the nodes.
        run: the node's operator.
    """
    view = _viewed(node.args[0])
    if values[view] is UNREAD:
        new = args[1]
    else:
        new = values[view].clone()
        run(new, *args[1:])
        mark_severed(new, "slice")
    _assign(view, new, values)
    return new


def refresh(
    node: fx.Node, new: Any, values: dict[fx.Node, Any], again: Callable[[fx.Node], Any]
) -> None:
    """Bring copies up to date that are views for others, after a node has written.

    Arguments:
        new: what the node returned.
        again: makes the value of a node anew.
    """
    written, root = _viewed(node.args[0]), _root(node)
    for each in [each for each in values if _is_copy(values[each]) and _root(each) is root]:
        if _viewed(each) is written:
            values[each] = new
        elif any(user not in values for user in each.users if user is not node):  # it is needed
            values[each] = again(_viewed(each))


def _viewed(node: Any) -> fx.Node:
    """What a node is, which may return what it has written to."""
    while writes(node):
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _root(node: Any) -> fx.Node:
    """What a node is a view of."""
    while isinstance(node.target, torch._ops.OpOverload) and node.args:
        arguments = node.target._schema.arguments
        if not arguments or arguments[0].alias_info is None:
            break
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _assign(view: fx.Node, new: Any, values: dict[fx.Node, Any]) -> None:
    key, base = _key(view), view.args[0] if view.args else None
    if key is None or not isinstance(base, fx.Node):
        raise ExportError(
            f"exported_program: {view.name} ({view.target}) is written to, but it is a view of a "
            "part of a split dim, so that it is a copy here. Write by index, x[i] = ..., or keep "
            "the dim whole; of a program after run_decompositions() it works"
        )
    if _is_copy(values[base]):
        whole = values[base].clone()
        whole[key] = new
        _assign(base, whole, values)
    else:
        values[base][key] = new


def _key(node: fx.Node) -> tuple[Any, ...] | None:
    """The index by which a node is a part of another; None if it is not, or varies."""
    if node.target not in _PARTS or node.kwargs or not isinstance(node.args[0], fx.Node):
        return None
    if any(isinstance(each, fx.Node) for each in node.args[1:]):
        return None
    dim, index = _PARTS[node.target](*node.args[1:])
    before: int = dim % node.args[0].meta["val"].dim()
    return (slice(None),) * before + (index,)


_PARTS: dict[Any, Callable[..., tuple[int, Any]]] = {
    _aten.slice.Tensor: lambda dim=0, start=None, end=None, step=1: (dim, slice(start, end, step)),
    _aten.select.int: lambda dim, index: (dim, index),
    _aten.narrow.default: lambda dim, start, length: (dim, slice(start, start + length)),
}
