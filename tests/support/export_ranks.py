"""Run exported programs of all ranks in one process: functional collectives on simulated ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.core.world import current
from shardwise.export.recording import group_name


class Routed(TorchDispatchMode):
    """Mode that hands torch's functional collectives to the communicators of simulated ranks."""

    def __init__(self, mesh: sw.DeviceMesh) -> None:
        super().__init__()
        self._ranks = {}
        for count in range(1, mesh.ndim + 1):
            for axes in itertools.permutations(range(mesh.ndim), count):
                ranks = mesh.ranks_along(axes)
                self._ranks[group_name(ranks, current().size)] = ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "_c10d_functional":
            return func(*args, **(kwargs or {}))
        name, x = func._opname, args[0]
        if name == "wait_tensor":
            return x
        ranks = self._ranks[args[-1]]
        talk = current().communicator(ranks, ())
        if name == "all_reduce":
            return talk.all_reduce(x, args[1])
        if name == "all_gather_into_tensor":
            return talk.all_gather(x, 0)
        if name == "reduce_scatter_tensor":
            return talk.reduce_scatter(x, 0, op=args[1])
        if name == "all_to_all_single":
            taken, given = args[1:3]
            shapes = [(each, *x.shape[1:]) for each in taken]
            return torch.cat(talk.all_to_all(list(x.split(given)), shapes))
        raise NotImplementedError(name)


def collectives(program: torch.export.ExportedProgram) -> dict[str, int]:
    """Count the collectives of a program, by kind."""
    return dict(
        Counter(
            node.target._opname
            for node in program.graph.nodes
            if getattr(node.target, "namespace", "") == "_c10d_functional"
            and node.target._opname != "wait_tensor"
        )
    )


class Checked(fx.Interpreter):
    """Interpreter that compares the shape and dtype of each result with the node's metadata."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        expected = n.meta.get("val")
        if n.op != "output" and isinstance(result, torch.Tensor):
            assert isinstance(expected, torch.Tensor), n
            assert (result.shape, result.dtype) == (expected.shape, expected.dtype), n
        return result


def check_metadata(program: torch.export.ExportedProgram, args: Any, kwargs: Any) -> None:
    """Check that every node's metadata has local shapes and the signature names real nodes."""
    given = iter(pytree.tree_leaves((args, kwargs)))
    held = {**program.state_dict, **program.constants}
    inputs = [
        next(given) if spec.kind == InputKind.USER_INPUT else held[spec.target].detach().clone()
        for spec in program.graph_signature.input_specs
    ]
    with torch.no_grad():
        Checked(program.graph_module).run(*inputs)
    placeholders = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    assert placeholders == [spec.arg.name for spec in program.graph_signature.input_specs]
    for spec, result in zip(
        program.graph_signature.output_specs, program.graph.output_node().args[0], strict=True
    ):
        assert not isinstance(result, fx.Node) or spec.arg.name == result.name
    program.validate()
