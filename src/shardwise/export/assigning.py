"""Assignments such as `buffer[2:5] = x`, which export writes as a view and a copy to it.

Of a split dim that view would be fetched from other ranks first, only to be overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_aten: Any = torch.ops.aten


class _Unread:
    """Stands for a view that is only written to, all of it: it is not made."""


UNREAD = _Unread()


def is_assigned_to(node: fx.Node) -> bool:
    """Whether a node is a part of another that is written to, all of it, and that nobody reads."""
    if _key(node) is None or len(node.users) != 1:
        return False
    (user,) = node.users
    is_target = user.target is _aten.copy_.default and user.args[0] is node
    return is_target and user.args[1] is not node and not user.users


def assign(node: fx.Node, values: dict[fx.Node, Any], value: Any) -> None:
    """Run a copy to such a part as an assignment by index."""
    (part,) = (each for each in node.args[:1] if isinstance(each, fx.Node))
    values[part.args[0]][_key(part)] = value  # type: ignore[index]


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
