"""Remove nodes from a recorded graph: `clean` right after the recording, `simplify` at the end.

`clean` removes what only the recording needed. `simplify` needs the nodes' values, and removes
operators that change nothing: an addition of zeros (a contribution to a sum is zeros on all ranks
but one), or an operator that returns its argument. Results stay the same; a
tensor that is written to is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from shardwise.export.operators import Aliases, is_collective, is_random, writes
from shardwise.torch_internals import functional_collectives, pytree

_aten: Any = torch.ops.aten
_META = torch.device("meta")

# ---- clean


def clean(graph: fx.Graph, device: torch.device) -> None:
    """Remove aliases, unused nodes and repeated computations, and replace meta devices."""
    _remove_aliases(graph)
    _replace_meta_devices(graph, device)
    if not any(writes(node) for node in graph.nodes):
        _share_equal_nodes(graph)
    _remove_unused(graph)


def _remove_aliases(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target in (_aten.alias.default, _aten.detach.default):
            (source,) = node.args
            for name in ("layout", "nn_module_stack", "stack_trace"):
                if name in node.meta:
                    source.meta.setdefault(name, node.meta[name])
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _replace_meta_devices(graph: fx.Graph, device: torch.device) -> None:
    def replace(found: torch.device) -> torch.device:
        return device if found == _META else found

    for node in graph.nodes:
        node.args, node.kwargs = pytree.tree_map_only(
            torch.device, replace, (node.args, node.kwargs)
        )


def _share_equal_nodes(graph: fx.Graph) -> None:
    """Run the same operator on the same values once.

    Not for collectives: values may be the same on this rank only, and all ranks must run the same
    collectives. DTensors already share the moves of one tensor (`dtensor.input_moves`).
    """
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or is_random(node) or is_collective(node):
            continue
        flat, structure = pytree.tree_flatten((node.args, node.kwargs))
        key = (node.target, str(structure), *((type(each), each) for each in flat))
        try:
            first = seen.setdefault(key, node)
        except TypeError:  # an argument that is not hashable
            continue
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _remove_unused(graph: fx.Graph) -> None:
    graph.eliminate_dead_code(is_impure_node=_must_stay)
    graph.lint()


def _must_stay(node: fx.Node) -> bool:
    # All ranks must run the same collectives and draw as many random numbers, also a rank that does
    # not use the result. The wait must stay as well: when torch loads or compiles a program, it
    # drops collectives that nothing waits for.
    is_awaited = node.target is functional_collectives.wait_tensor.default
    is_shared = is_collective(node) or is_awaited or is_random(node)
    return node.op in ("placeholder", "output") or writes(node) or is_shared


# ---- simplify


def simplify(graph: fx.Graph) -> None:
    """Remove operators that change no result.

    Arguments:
        graph: a graph whose nodes have `meta["val"]`.
    """
    aliases = Aliases(graph)
    for node in list(graph.nodes):
        rule = _RULES.get(node.target)
        if rule is not None and not aliases.is_written(node):
            same = rule(node, aliases)
            if same is not None and _can_replace(node, same, aliases):
                node.replace_all_uses_with(same)
                graph.erase_node(node)
    _remove_unused(graph)


RewriteRule = Callable[[fx.Node, Aliases], fx.Node | None]
"""Returns the node with the same value as the given one, if there is one; may change it instead."""


def _can_replace(node: fx.Node, same: fx.Node, aliases: Aliases) -> bool:
    """Check whether users of a node may get another node with the same value."""
    # The caller must get new memory, unless the node was a view before.
    return not aliases.is_written(same) and (node.target in _VIEWS or not aliases.is_returned(node))


# ---- rules for operators that return their argument


def _view_as_itself(node: fx.Node, aliases: Aliases) -> fx.Node | None:
    """x.view_as(x)."""
    x, like = node.args
    return x if x is like and isinstance(x, fx.Node) else None


def _cast_to_own(node: fx.Node, aliases: Aliases) -> fx.Node | None:
    """x.to(its own device or dtype)."""
    x = node.args[0]
    is_plain = not node.kwargs and not any(isinstance(each, bool) for each in node.args)
    return x if is_plain and isinstance(x, fx.Node) and _are_alike(x, node) else None


def _copied_constant(node: fx.Node, aliases: Aliases) -> fx.Node | None:
    """Return a copy of a constant, made in case something writes to it."""
    (x,) = node.args
    return x if isinstance(x, fx.Node) else None


def _detached_constant(node: fx.Node, aliases: Aliases) -> fx.Node | None:
    """x.detach_() of an input that does not require a gradient."""
    (x,) = node.args
    if isinstance(x, fx.Node) and x.op == "placeholder" and not x.meta["val"].requires_grad:
        return x
    return None


# ---- rules for zeros


def _is_zero(value: Any, aliases: Aliases) -> bool:
    if isinstance(value, fx.Node):
        return value.target in _ZEROS and not aliases.is_written(value)
    return type(value) in (int, float) and value == 0


def _added_zeros(node: fx.Node, aliases: Aliases) -> fx.Node | None:
    """x + 0, 0 + x or x - 0."""
    left, right = node.args
    if _is_zero(right, aliases) and isinstance(left, fx.Node) and _are_alike(left, node):
        return left
    is_sum = node.target is _aten.add.Tensor and not node.kwargs and _is_zero(left, aliases)
    if is_sum and isinstance(right, fx.Node) and _are_alike(right, node):
        return right
    return None


def _zero_bias(node: fx.Node, aliases: Aliases) -> None:
    """A layer whose bias is zeros: drop the bias."""
    if len(node.args) > 2 and _is_zero(node.args[2], aliases):
        x, weight, _, *others = node.args
        node.args = (x, weight, None, *others) if others else (x, weight)


def _product_plus_zeros(node: fx.Node, aliases: Aliases) -> None:
    """zeros + x @ y: make it x @ y."""
    zeros, x, y = node.args
    if not node.kwargs and _is_zero(zeros, aliases):
        node.target, node.args = _aten.mm.default, (x, y)


def _are_alike(one: fx.Node, other: fx.Node) -> bool:
    """Check whether shape, dtype and device of two nodes are known to be the same, at all sizes."""
    a, b = one.meta.get("val"), other.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return (a.dtype, a.device) == (b.dtype, b.device) and _sizes(a.shape) == _sizes(b.shape)


def _sizes(shape: Sequence[Any]) -> list[Any]:
    # Expressions, as comparing symbols themselves would add the guard that they are equal.
    return [size.node.expr if isinstance(size, torch.SymInt) else int(size) for size in shape]


_VIEWS = {_aten.view_as.default, _aten.to.device, _aten.to.dtype, _aten.detach_.default}
"""Operators of the rules whose results were no new memory before."""

_ZEROS = {_aten.zeros_like.default, _aten.zeros.default, _aten.new_zeros.default}

_RULES: dict[Any, RewriteRule] = {
    _aten.view_as.default: _view_as_itself,
    _aten.to.device: _cast_to_own,
    _aten.to.dtype: _cast_to_own,
    _aten.lift_fresh_copy.default: _copied_constant,
    _aten.detach_.default: _detached_constant,
    _aten.add.Tensor: _added_zeros,
    _aten.sub.Tensor: _added_zeros,
    _aten.linear.default: _zero_bias,
    _aten.conv1d.default: _zero_bias,
    _aten.conv2d.default: _zero_bias,
    _aten.conv3d.default: _zero_bias,
    _aten.convolution.default: _zero_bias,
    _aten.addmm.default: _product_plus_zeros,
}
