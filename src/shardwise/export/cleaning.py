"""A recorded graph without what only the recording needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardwise.export.operators import draws, updates_statistics
from shardwise.torch_internals import (
    OpOverload,
    functional_collectives,
    operator_name,
    pytree,
    schema_of,
)

_SAME = {torch.ops.aten.alias.default, torch.ops.aten.detach.default}
_META = torch.device("meta")


def clean(graph: fx.Graph, device: torch.device) -> None:
    """Drop aliases and what nobody uses, share what is computed twice, put things on a device."""
    _drop_aliases(graph)
    _place(graph, device)
    if not any(writes(node) for node in graph.nodes):
        _share(graph)
    drop_unused(graph)


def drop_unused(graph: fx.Graph) -> None:
    """Drop what nobody uses and no other rank waits for."""
    graph.eliminate_dead_code(is_impure_node=_must_stay)
    graph.lint()


def writes(node: fx.Node) -> bool:
    """Whether a node writes to one of its arguments."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    return schema_of(target).is_mutable or updates_statistics(target, node.args, node.kwargs)


def is_collective(node: fx.Node) -> bool:
    """Whether ranks meet in a node."""
    target = node.target
    return (
        isinstance(target, OpOverload)
        and target.namespace == "_c10d_functional"
        and operator_name(target) != "wait_tensor"
    )


def _must_stay(node: fx.Node) -> bool:
    # All ranks must run the same collectives, and draw as much, also where one has no use for the
    # result. There the wait stays as well: torch drops, as it loads or compiles a program, what
    # nobody waits for.
    is_awaited = node.target is functional_collectives.wait_tensor.default
    is_shared = is_collective(node) or is_awaited or is_random(node)
    return node.op in ("placeholder", "output") or writes(node) or is_shared


def _drop_aliases(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target in _SAME:
            (same,) = node.args
            for name in ("layout", "nn_module_stack", "stack_trace"):
                if name in node.meta:
                    same.meta.setdefault(name, node.meta[name])
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _place(graph: fx.Graph, device: torch.device) -> None:
    def placed(found: torch.device) -> torch.device:
        return device if found == _META else found

    for node in graph.nodes:
        node.args, node.kwargs = pytree.tree_map_only(
            torch.device, placed, (node.args, node.kwargs)
        )


def _share(graph: fx.Graph) -> None:
    """The same operator on the same values is run once.

    No collectives: values may be the same on this rank alone, and all must meet in the same ones.
    What is a collective of the same tensor twice, DTensors know (`dispatch.moving`).
    """
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or is_random(node) or is_collective(node):
            continue
        flat, structure = pytree.tree_flatten((node.args, node.kwargs))
        key = (node.target, str(structure), *((type(each), each) for each in flat))
        try:
            first = seen.setdefault(key, node)
        except TypeError:  # an argument that cannot be a key
            continue
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    return draws(node.target, node.args, node.kwargs)
