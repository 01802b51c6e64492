"""What is written at the nodes of a recorded graph: how values lie, and why ranks meet.

`meta["layout"]` is a Layout. `meta["custom"]` has the same in words, and what is known of
collectives, as plain data: that is saved with a program.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from shardwise import layout_input
from shardwise.comm.trace import Event
from shardwise.errors import LayoutError
from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh
from shardwise.tensor import DTensor
from shardwise.torch_internals import operator_name

LAYOUT, LAYOUTS, COLLECTIVE = "layout", "layouts", "collective"
"""What is said at a node: how it, or each of its results, lies; what is known of a collective."""

NAME, INPUTS, MODULE = "name", "inputs", "module"
"""And what users call an input; in which module a step is, which has no
`nn_module_stack`; at the first call, how all inputs lie, as theirs is not saved."""

_ORDERS = {
    *("wait_tensor", "split", "split_with_sizes", "getitem", "slice", "narrow", "cat", "view"),
    *("movedim", "permute", "transpose", "contiguous", "clone", "view_as", "reshape"),
}
"""Operators that put in order what a collective gave."""


def node_of(tensor: torch.Tensor) -> fx.Node | None:
    """The node that made a tensor which is being recorded."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    slot = get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def note(tensor: torch.Tensor) -> None:
    """Write at the node of a tensor how it lies; a plain one is made alike by all ranks."""
    node = node_of(tensor)
    if node is None:
        return
    if isinstance(tensor, DTensor):
        note_layout(node, tensor._layout)
    elif "layout" not in node.meta:
        say(node, LAYOUT, str(list(tensor.shape)))


def note_layout(node: fx.Node | None, layout: Layout) -> None:
    """Write at a node how its value lies."""
    if node is not None:
        node.meta["layout"] = layout
        say(node, LAYOUT, repr(layout))


def note_collective(started: torch.Tensor, event: Event | None) -> None:
    """Write at the node of a collective what it is for."""
    node = node_of(started)
    if node is None or event is None:
        return
    cause = event.cause
    said = {
        "kind": event.kind,
        "axes": list(event.axes),
        "ranks": list(event.ranks),
        "bytes": event.bytes,
        "operator": cause.operator,
        "module": cause.module,
        "direction": cause.direction,
    }
    if cause.target is not None:
        said["to"] = repr(cause.target)
    say(node, COLLECTIVE, said)


def say(node: fx.Node, name: str, value: Any) -> None:
    """Write at a node what is saved with it."""
    node.meta["custom"] = {**node.meta.get("custom", {}), name: value}


def said(node: fx.Node, name: str) -> Any:
    """What was written at a node; None if nothing was."""
    return (node.meta.get("custom") or {}).get(name)


# ---- when every node has its value


def finish(graph: fx.Graph, mesh: DeviceMesh) -> None:
    """Write down how results of moves lie, and let what is said have symbols for dynamic sizes.

    Called as a rank of the mesh, once every node has `meta["val"]`.
    """
    for node in graph.nodes:
        text = said(node, LAYOUT)
        if text is not None:
            layout = node.meta.get("layout") or _parsed(text, mesh)
            if layout is not None:
                node.meta["layout"] = layout
    for node in graph.nodes:
        collective = said(node, COLLECTIVE)
        if collective is not None and "to" in collective:
            _follow(node, _parsed(collective["to"], mesh))
    for node in graph.nodes:
        layout = node.meta.get("layout")
        value = node.meta.get("val")
        if layout is not None and fits(layout, value):
            say(node, LAYOUT, in_words(layout, value))
        elif said(node, LAYOUT) is not None:
            # One node became several, such as a write and a view of it: this is not the one.
            node.meta.pop("layout", None)
            node.meta["custom"] = {k: v for k, v in node.meta["custom"].items() if k != LAYOUT}
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.meta.get("val"), list | tuple):
            _say_all(node)
    inputs = {
        node.name: said(node, LAYOUT)
        for node in graph.nodes
        if node.op == "placeholder" and said(node, LAYOUT) is not None
    }
    first = next((node for node in graph.nodes if node.op == "call_function"), None)
    if inputs and first is not None:
        say(first, INPUTS, inputs)


def _say_all(node: fx.Node) -> None:
    """At a node with several results, how they lie: what takes them apart is not saved."""
    texts = [""] * len(node.meta["val"])
    for user in node.users:
        if user.target is operator.getitem and said(user, LAYOUT) is not None:
            texts[user.args[1]] = said(user, LAYOUT)  # type: ignore[index]
    if any(texts):
        say(node, LAYOUTS, texts)


def _parsed(text: str, mesh: DeviceMesh) -> Layout | None:
    try:
        return Layout.parse(text, mesh)
    except LayoutError:  # of another mesh, if the original is a rank's program itself
        return None


def _follow(node: fx.Node, target: Layout | None) -> None:
    """Find the result of a collective: it is waited for, put in order, and then it fits."""
    if target is None:
        return
    for user in node.users:
        name = operator_name(user.target) or getattr(user.target, "__name__", "")
        if "layout" not in user.meta and name in _ORDERS:
            if fits(target, user.meta.get("val")):
                user.meta["layout"] = target
            _follow(user, target)


def fits(layout: Layout, value: Any) -> bool:
    """Whether a value can be this rank's piece."""
    if not isinstance(value, torch.Tensor) or value.dim() != len(layout.shape):
        return False
    return all(
        isinstance(size, torch.SymInt) or size == here
        for size, here in zip(value.shape, layout.local_shape(), strict=True)
    )


def in_words(layout: Layout, local: torch.Tensor) -> str:
    """The layout's text, with symbols where the local tensor has them."""
    sizes = [
        _whole(layout, dim, size) if isinstance(size, torch.SymInt) else str(layout.shape[dim])
        for dim, size in enumerate(local.shape)
    ]
    return layout_input.format_layout(
        layout.mesh, sizes, layout.shard_order, layout.partial, layout.cuts
    )


def _whole(layout: Layout, dim: int, size: torch.SymInt) -> str:
    """The global size of a dim whose local size is a symbol."""
    parts = math.prod(layout.mesh.shape[axis] for axis in layout.shard_order[dim])
    if layout.shape[dim] != parts * layout.local_shape()[dim]:
        return "?"
    return str(size.node.expr * parts).replace(" ", "")
