"""Nodes that nobody would have written by hand, taken out of a graph whose values are known.

A contribution to a sum is zeros on all ranks but one: it need not be made, nor added. What only
hands on its argument is left out. Results stay the same; a tensor that is written to is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from shardwise.export.aliases import Aliases
from shardwise.export.cleaning import drop_unused

_aten: Any = torch.ops.aten


def simplify(graph: fx.Graph) -> None:
    """Leave out what changes no result.

    Arguments:
        graph: its nodes have `meta["val"]`.
    """
    written = _Written(graph)
    for node in list(graph.nodes):
        rule = _RULES.get(node.target)
        if rule is not None and node not in written:
            same = rule(node, written)
            if same is not None and _may_stand_for(same, node, written):
                node.replace_all_uses_with(same)
                graph.erase_node(node)
    drop_unused(graph)


class _Written:
    """The tensors of a graph whose memory is written to, or given to those outside."""

    def __init__(self, graph: fx.Graph) -> None:
        self._aliases = Aliases(graph)
        self._returned = self._aliases.origins[graph.output_node()]

    def __contains__(self, node: fx.Node) -> bool:
        return self._aliases.is_written(node)

    def is_returned(self, node: fx.Node) -> bool:
        """Whether those outside may get the memory of a node."""
        return node in self._returned


def _may_stand_for(same: fx.Node, node: fx.Node, written: _Written) -> bool:
    """Whether users of a node may have another one, of the same values."""
    # Those outside were promised new memory, unless it was a view.
    return same not in written and (node.target in _VIEWS or not written.is_returned(node))


# ---- what hands on its argument


def _itself(node: fx.Node, written: _Written) -> fx.Node | None:
    """x.view_as(x)."""
    x, like = node.args
    return x if x is like and isinstance(x, fx.Node) else None


def _moved(node: fx.Node, written: _Written) -> fx.Node | None:
    """x.to(the device and the dtype that it has)."""
    x = node.args[0]
    is_plain = not node.kwargs and not any(isinstance(each, bool) for each in node.args)
    return x if is_plain and isinstance(x, fx.Node) and _alike(x, node) else None


def _constant(node: fx.Node, written: _Written) -> fx.Node | None:
    """A copy of a constant, made lest somebody writes to it."""
    (x,) = node.args
    return x if isinstance(x, fx.Node) else None


def _detached(node: fx.Node, written: _Written) -> fx.Node | None:
    """A constant, which has no gradient anyway."""
    (x,) = node.args
    if isinstance(x, fx.Node) and x.op == "placeholder" and not x.meta["val"].requires_grad:
        return x
    return None


# ---- zeros


def _is_zero(value: Any, written: _Written) -> bool:
    if isinstance(value, fx.Node):
        return value.target in _ZEROS and value not in written
    return type(value) in (int, float) and value == 0


def _sum(node: fx.Node, written: _Written) -> fx.Node | None:
    """x + 0, 0 + x or x - 0."""
    left, right = node.args
    if _is_zero(right, written) and isinstance(left, fx.Node) and _alike(left, node):
        return left
    is_sum = node.target is _aten.add.Tensor and not node.kwargs
    if is_sum and _is_zero(left, written) and isinstance(right, fx.Node) and _alike(right, node):
        return right
    return None


def _without_bias(node: fx.Node, written: _Written) -> None:
    """A layer whose bias is zero."""
    if len(node.args) > 2 and _is_zero(node.args[2], written):
        x, weight, _, *others = node.args
        node.args = (x, weight, None, *others) if others else (x, weight)


def _product(node: fx.Node, written: _Written) -> None:
    """zeros + x @ y."""
    zeros, x, y = node.args
    if not node.kwargs and _is_zero(zeros, written):
        node.target, node.args = _aten.mm.default, (x, y)


def _alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether shape, dtype and device are known to be the same, at all sizes."""
    a, b = one.meta.get("val"), other.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return (a.dtype, a.device) == (b.dtype, b.device) and _plain(a.shape) == _plain(b.shape)


def _plain(shape: Sequence[Any]) -> list[Any]:
    # Comparing symbols as numbers would make them equal from then on.
    return [size.node.expr if isinstance(size, torch.SymInt) else int(size) for size in shape]


_VIEWS = {_aten.view_as.default, _aten.to.device, _aten.to.dtype, _aten.detach_.default}
"""Those whose results were no new memory before."""

_ZEROS = {_aten.zeros_like.default, _aten.zeros.default, _aten.new_zeros.default}

_RULES: dict[Any, Callable[[fx.Node, _Written], fx.Node | None]] = {
    _aten.view_as.default: _itself,
    _aten.to.device: _moved,
    _aten.to.dtype: _moved,
    _aten.lift_fresh_copy.default: _constant,
    _aten.detach_.default: _detached,
    _aten.add.Tensor: _sum,
    _aten.sub.Tensor: _sum,
    _aten.linear.default: _without_bias,
    _aten.conv1d.default: _without_bias,
    _aten.conv2d.default: _without_bias,
    _aten.conv3d.default: _without_bias,
    _aten.convolution.default: _without_bias,
    _aten.addmm.default: _product,
}
