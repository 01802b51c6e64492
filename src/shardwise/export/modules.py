"""The modules of an exported program: which there are, what they hold, what their weights mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.export import ExportedProgram

from shardwise.export.plan import Inputs
from shardwise.parallel.names import joined
from shardwise.torch_internals import operator_name

Shape = tuple[int, ...]


@dataclass
class ProgramModule:
    """A module as a program still knows it."""

    path: str
    shapes: dict[str, Shape] = field(default_factory=dict)
    """The shapes of parameters, buffers and constants that it holds itself."""
    weight_users: list[fx.Node] = field(default_factory=list)
    """What is done with its weight, by itself if it was called."""

    def name_of(self, held: str) -> str:
        """The name of what it holds, in the program."""
        return joined(self.path, held)

    def kind(self) -> str | None:
        """What its weight means, as `parallel.styles.kind_of`; None: nothing to split by rows.

        By what is done with it, as a subclass of Linear, or a module like it, is one too.
        """
        if len(self.shapes.get("weight", ())) < 2:
            return None
        for user in self.weight_users:
            name = operator_name(user.target)
            if "embedding" in name:
                return "embedding"
            if name.startswith("conv_transpose") or (name == "convolution" and user.args[6]):
                return "transposed"
            if name in ("addmm", "mm", "matmul"):  # x @ weight
                return "transposed"
        return "linear"


def modules_of(program: ExportedProgram) -> dict[str, ProgramModule]:
    """The modules by path: those that were called, and those that hold something."""
    found: dict[str, ProgramModule] = {}
    for path in _paths(program.graph_module):
        found.setdefault(path, ProgramModule(path))
    inputs = Inputs(program)
    for node, _ in inputs.all:
        value = node.meta.get("val")
        for name in inputs.names.get(node.name, ()):
            path, _, held = name.rpartition(".")
            module = found.setdefault(path, ProgramModule(path))
            if isinstance(value, torch.Tensor):
                module.shapes[held] = tuple(map(int, value.shape))
            if held == "weight":
                own = [user for user in node.users if innermost(user) == path]
                module.weight_users = own or list(node.users)
    return found


def _paths(module: fx.GraphModule) -> Iterator[str]:
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                for path, _ in (node.meta.get("nn_module_stack") or {}).values():
                    yield path


def innermost(node: fx.Node) -> str | None:
    """The path of the module that a node is of; None where the graph does not say."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0] if stack else None
