"""Annotations of the nodes of a recorded graph: layouts, collectives, and values without data.

`meta["layout"]` is a Layout. `meta["custom"]` has the layout as text, and facts about collectives.
It is plain data, which torch saves with a program. `meta["val"]` is a fake tensor, as in torch's
programs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from shardwise.comm.trace import Event
from shardwise.core import layout_input
from shardwise.core.errors import ExportError, LayoutError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.dtensor.tensor import DTensor
from shardwise.torch_internals import (
    FakeTensorMode,
    enable_python_dispatcher,
    guard_error,
    operator_name,
)

# The keys in `meta["custom"]`.
LAYOUT = "layout"
"""The layout of the node's value, as text."""
LAYOUTS = "layouts"
"""The layouts of the node's several results: `getitem` nodes are not saved."""
COLLECTIVE = "collective"
"""The kind, axes, ranks, bytes and cause of a collective."""
NAME = "name"
"""The name that users have for an input."""
MODULE = "module"
"""The module of a node of a training step, which has no `nn_module_stack`."""
INPUTS = "inputs"
"""At the first call, the layouts of all inputs: the metadata of placeholders is not saved."""

_REARRANGING = {
    *("wait_tensor", "split", "split_with_sizes", "getitem", "slice", "narrow", "cat", "view"),
    *("movedim", "permute", "transpose", "contiguous", "clone", "view_as", "reshape"),
}
"""Operators that only rearrange the result of a collective."""


# ---- reading and writing one annotation


def set_annotation(node: fx.Node, name: str, value: Any) -> None:
    """Write an annotation that is saved with the node."""
    node.meta["custom"] = {**node.meta.get("custom", {}), name: value}


def get_annotation(node: fx.Node, name: str) -> Any:
    """Return an annotation of a node; None if it has none of this name."""
    return (node.meta.get("custom") or {}).get(name)


def module_path_of(node: fx.Node) -> str | None:
    """Return the path of the innermost module that a node belongs to; None if it is not known."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0] if stack else None


# ---- while recording


def node_of(tensor: torch.Tensor) -> fx.Node | None:
    """Return the node that computed a tensor which is being recorded; None for other tensors."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    slot = get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def annotate_tensor(tensor: torch.Tensor) -> None:
    """Write the layout of a tensor at its node; a plain tensor counts as replicated."""
    node = node_of(tensor)
    if node is None:
        return
    if isinstance(tensor, DTensor):
        annotate_layout(node, tensor._layout)
    elif "layout" not in node.meta:
        set_annotation(node, LAYOUT, str(list(tensor.shape)))


def annotate_layout(node: fx.Node | None, layout: Layout) -> None:
    """Write a layout at a node, if there is one."""
    if node is not None:
        node.meta["layout"] = layout
        set_annotation(node, LAYOUT, repr(layout))


def annotate_collective(started: torch.Tensor, event: Event | None) -> None:
    """Write the kind, axes, bytes and cause of a collective at its node."""
    node = node_of(started)
    if node is None or event is None:
        return
    cause = event.cause
    facts = {
        "kind": event.kind,
        "axes": list(event.axes),
        "ranks": list(event.ranks),
        "bytes": event.bytes,
        "operator": cause.operator,
        "module": cause.module,
        "direction": cause.direction,
    }
    if cause.target is not None:
        facts["to"] = repr(cause.target)
    set_annotation(node, COLLECTIVE, facts)


# ---- once every node has its value


def finish_annotations(graph: fx.Graph, mesh: DeviceMesh) -> None:
    """Annotate the results of collectives, and write dynamic sizes in layouts as symbols.

    Call it as a rank of the mesh, once every node has `meta["val"]`.
    """
    for node in graph.nodes:
        text = get_annotation(node, LAYOUT)
        if text is not None:
            layout = node.meta.get("layout") or _parse_layout(text, mesh)
            if layout is not None:
                node.meta["layout"] = layout
    for node in graph.nodes:
        collective = get_annotation(node, COLLECTIVE)
        if collective is not None and "to" in collective:
            _annotate_result(node, _parse_layout(collective["to"], mesh))
    for node in graph.nodes:
        layout = node.meta.get("layout")
        value = node.meta.get("val")
        if layout is not None and _fits(layout, value):
            set_annotation(node, LAYOUT, _format_layout(layout, value))
        elif get_annotation(node, LAYOUT) is not None:
            # One node became several, such as a write and a view of it: the layout is another's.
            node.meta.pop("layout", None)
            node.meta["custom"] = {k: v for k, v in node.meta["custom"].items() if k != LAYOUT}
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.meta.get("val"), list | tuple):
            _annotate_all_results(node)
    inputs = {
        node.name: get_annotation(node, LAYOUT)
        for node in graph.nodes
        if node.op == "placeholder" and get_annotation(node, LAYOUT) is not None
    }
    first = next((node for node in graph.nodes if node.op == "call_function"), None)
    if inputs and first is not None:
        set_annotation(first, INPUTS, inputs)


def _annotate_all_results(node: fx.Node) -> None:
    """Write the layouts of a node's several results at the node itself."""
    texts = [""] * len(node.meta["val"])
    for user in node.users:
        if user.target is operator.getitem and get_annotation(user, LAYOUT) is not None:
            texts[user.args[1]] = get_annotation(user, LAYOUT)  # type: ignore[index]
    if any(texts):
        set_annotation(node, LAYOUTS, texts)


def _parse_layout(text: str, mesh: DeviceMesh) -> Layout | None:
    try:
        return Layout.parse(text, mesh)
    except LayoutError:  # on another mesh, if the original is itself a rank's program
        return None


def _annotate_result(node: fx.Node, target: Layout | None) -> None:
    """Give the target layout of a collective to the nodes behind it that have the local shape."""
    if target is None:
        return
    for user in node.users:
        name = operator_name(user.target) or getattr(user.target, "__name__", "")
        if "layout" not in user.meta and name in _REARRANGING:
            if _fits(target, user.meta.get("val")):
                user.meta["layout"] = target
            _annotate_result(user, target)


def _fits(layout: Layout, value: Any) -> bool:
    """Check whether a value has the shape of this rank's shard; a symbol fits any size."""
    if not isinstance(value, torch.Tensor) or value.dim() != len(layout.shape):
        return False
    return all(
        isinstance(size, torch.SymInt) or size == expected
        for size, expected in zip(value.shape, layout.local_shape(), strict=True)
    )


def _format_layout(layout: Layout, local: torch.Tensor) -> str:
    """Format a layout, with symbols in place of the sizes that the local tensor has as symbols."""
    sizes = [
        _format_size(layout, dim, size)
        if isinstance(size, torch.SymInt)
        else str(layout.shape[dim])
        for dim, size in enumerate(local.shape)
    ]
    return layout_input.format_layout(
        layout.mesh, sizes, layout.shard_order, layout.partial, layout.cuts
    )


def _format_size(layout: Layout, dim: int, size: torch.SymInt) -> str:
    """Format the global size of a dim whose local size is a symbol; "?" if it is not known."""
    parts = math.prod(layout.mesh.shape[axis] for axis in layout.shard_order[dim])
    if layout.shape[dim] != parts * layout.local_shape()[dim]:
        return "?"
    return str(size.node.expr * parts).replace(" ", "")


# ---- values without data


def find_constants(module: fx.GraphModule, what: str) -> dict[fx.Node, torch.Tensor]:
    """Return the tensors with data that rules made, such as indices, by their `get_attr` nodes.

    Arguments:
        what: the argument of the user's call that was recorded, for errors.
    """
    found: dict[fx.Node, torch.Tensor] = {}
    for node in module.graph.nodes:
        value = getattr(module, node.target) if node.op == "get_attr" else None
        if not isinstance(value, torch.Tensor):
            continue
        if value.is_meta:
            raise ExportError(
                f"{what}: {node.name} was computed in a way that is not recorded; this is a "
                "mistake in shardwise"
            )
        found[node] = value
    return found


def propagate_values(module: fx.GraphModule, mode: FakeTensorMode, inputs: Sequence[Any]) -> None:
    """Give every node its `meta["val"]`, with symbols where sizes are dynamic."""
    module.recompile()
    # The Python dispatcher has kernels for dynamic sizes where those in C++ need numbers.
    with torch.no_grad(), enable_python_dispatcher(), _refuse_guards(mode.shape_env):
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*inputs)


@contextmanager
def _refuse_guards(environment: Any) -> Iterator[None]:
    """Raise ExportError if a node restricts a dynamic size: the original would get that guard too.

    Arguments:
        environment: the `ShapeEnv` of the sizes; None if all sizes are fixed.
    """
    if environment is None:
        yield
        return
    try:
        with environment.error_on_new_guards():
            yield
    except guard_error() as error:
        raise ExportError(
            "exported_program: one rank's program would not serve all of the dynamic sizes: "
            f"{error}; fix the size at export, or split other dims"
        ) from error
