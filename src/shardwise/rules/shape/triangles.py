"""Triangles and diagonals of matrices, by global indices."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.dtensor.tensor import DTensor
from shardwise.dtensor.writes import check_writable
from shardwise.rules.helpers.composed_ops import composed
from shardwise.rules.make.creation import contribution
from shardwise.rules.pointwise.elementwise import broadcast
from shardwise.rules.registry import rule
from shardwise.rules.spec import Spec, SplitContext
from shardwise.torch_internals import as_local


def _triangle(function: Any) -> Any:
    """Return the rule of a function that keeps one side of a diagonal.

    The local diagonal is the global one, shifted by the first row and column of the shard.
    """

    def spec(input: Any, diagonal: int = 0) -> Spec:
        def lower(context: SplitContext) -> Any:
            if not any(context.inputs[0].shard_order[-2:]):
                return None
            (rows, _), (columns, _) = (context.inputs[0].range(dim) for dim in (-2, -1))

            def local(input: torch.Tensor, diagonal: int = 0) -> Any:
                return function(input, diagonal + rows - columns)

            return local

        split = [f"d{input.dim() - 2}", f"d{input.dim() - 1}"]
        return broadcast([input], [(0,)], lower=lower, positions=split)

    return spec


rule("tril")(_triangle(torch.tril))
rule("triu")(_triangle(torch.triu))


@composed("fill_diagonal_")
def fill_diagonal_(input: DTensor, fill_value: Any, wrap: bool = False) -> DTensor:
    """Fill the diagonal; the target keeps its layout, and each rank writes its own elements."""
    check_writable("fill_diagonal_", input)
    layout = input._layout
    if layout.ndim < 2 or (layout.ndim > 2 and len(set(layout.shape)) > 1):
        torch.empty(layout.shape, device="meta").fill_diagonal_(0)  # raises torch's own error
    indices = _diagonal(layout.shape, wrap)
    with as_local():
        value = contribution(layout, fill_value)
        number = torch.full((), value, dtype=input.dtype, device=input.device)
        for box, here in layout.boxes():
            inside = torch.ones(indices.shape[1], dtype=torch.bool)
            for index, start, stop in zip(indices, box.start, box.stop, strict=True):
                inside &= (index >= start) & (index < stop)
            shift = torch.tensor(here.start).unsqueeze(1) - torch.tensor(box.start).unsqueeze(1)
            places = indices[:, inside] + shift
            # While a program is recorded, indices stay on the CPU: meta tensors have no values.
            local = tuple(places if input.is_meta else places.to(input.device))
            torch.Tensor.index_put_(input, local, number)
    return input


def _diagonal(shape: tuple[int, ...], wraps: bool) -> torch.Tensor:
    """Return the global indices of the diagonal's elements, one row per dim."""
    if wraps and len(shape) == 2 and shape[0] > shape[1] > 0:
        flat = torch.arange(0, shape[0] * shape[1], shape[1] + 1)
        return torch.stack([flat // shape[1], flat % shape[1]])
    return torch.arange(min(shape)).expand(len(shape), -1)
