"""Values without data for the nodes of a recorded graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from shardwise.export.errors import ExportError
from shardwise.torch_internals import FakeTensorMode, enable_python_dispatcher, guard_error


def constants_of(module: fx.GraphModule, what: str) -> dict[fx.Node, torch.Tensor]:
    """Tensors with data that rules made, such as indices, by the nodes that get them.

    Arguments:
        what: what was recorded, in an error.
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


def propagate(module: fx.GraphModule, mode: FakeTensorMode, inputs: Sequence[Any]) -> None:
    """Give every node its `meta["val"]`, with symbols where sizes are dynamic."""
    module.recompile()
    # The dispatcher has kernels in Python for dynamic sizes, where those in C++ want numbers.
    with torch.no_grad(), enable_python_dispatcher(), _unchanged(mode.shape_env):
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*inputs)


@contextmanager
def _unchanged(environment: Any) -> Iterator[None]:
    """Refuse to learn anything about dynamic sizes: it would hold for the original program, too."""
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
