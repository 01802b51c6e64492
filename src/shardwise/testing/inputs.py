"""Inputs of a checked call: samples of arguments, the layouts of tensors, and DTensors of them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Partial, Placement, Replicate, Shard
from shardwise.dtensor.local_shards import check_supported
from shardwise.dtensor.tensor import DTensor, tensors_in, wrap


def layouts_of(tensor: torch.Tensor, mesh: DeviceMesh) -> list[Layout]:
    """Return all layouts that a tensor can have on a mesh (for nested shards, two orders of
    axes)."""
    per_axis: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(tensor.dim()))]
    can_be_added = tensor.itemsize > 1  # torch does not add float8
    if can_be_added and (tensor.is_floating_point() or tensor.is_complex()):
        per_axis.append(Partial())
    found = [
        Layout.from_placements(mesh, tensor.shape, placements)
        for placements in itertools.product(per_axis, repeat=mesh.ndim)
    ]
    nested = [each for each in found if any(len(axes) > 1 for axes in each.shard_order)]
    return found + [each.relaid(axes[::-1] for axes in each.shard_order) for each in nested]


def piece(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return this rank's piece of a tensor that every rank has. Where the layout is Partial, it is
    a contribution: the contributions of all ranks add up to the tensor."""
    place = layout.mesh.get_coordinate()
    assert place is not None, "every rank is on the mesh"
    local = layout.piece_of(tensor, place).clone()
    for axis, _ in layout.partial:
        local = contribution(local, place[axis], layout.mesh.shape[axis])
    return local


def contribution(total: torch.Tensor, at: int, count: int) -> torch.Tensor:
    """Return one of `count` contributions to a sum: x is 2x - x + 0 + ..., which is exact in any
    order of addition."""
    if count == 1:
        return total
    finite = torch.isfinite(total)
    others = total if at == 0 else torch.zeros_like(total)
    return torch.where(finite, total * 2 if at == 0 else -total if at == 1 else others, others)


def distributed(tensor: torch.Tensor, layout: Layout) -> DTensor:
    """Return a leaf DTensor with this layout, of a tensor that every rank has."""
    check_supported("tensor", tensor)
    result = wrap(piece(tensor.detach(), layout), layout)
    result.requires_grad = tensor.requires_grad
    return result


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a result as a plain tensor, gathered if it is a DTensor; refuse a piece whose shape is
    not that of its layout."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    if tuple(local.shape) != tensor.mesh_layout.local_shape():
        raise AssertionError(
            f"the result says {tensor.mesh_layout!r}, but its piece has shape {tuple(local.shape)}"
        )
    return tensor.full_tensor()


class Sample:
    """The arguments of one call, with plain tensors.

    Example:
        >>> Sample(torch.randn(5, 4), dim=1)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among the arguments, in order."""
        return list(tensors_in((self.args, self.kwargs)))

    def filled(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with these tensors in place of the sample's own."""
        rest = iter(tensors)
        args = tuple(_filled(arg, rest) for arg in self.args)
        return args, {name: _filled(arg, rest) for name, arg in self.kwargs.items()}

    def __repr__(self) -> str:
        parts = [_format_argument(arg) for arg in self.args]
        parts += [f"{name}={_format_argument(arg)}" for name, arg in self.kwargs.items()]
        return f"({', '.join(parts)})"


def _filled(value: Any, rest: Iterator[torch.Tensor]) -> Any:
    """Return an argument with tensors replaced by the next ones of an iterator."""
    if isinstance(value, torch.Tensor):
        return next(rest)
    if isinstance(value, list | tuple):
        parts = [_filled(each, rest) for each in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _format_argument(value: Any) -> str:
    """Format an argument for messages; of a tensor, its dtype and shape."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_format_argument, value))}]"
    return repr(value)


def combinations(choices: Sequence[Sequence[Any]], most: int, seed: int) -> list[tuple[Any, ...]]:
    """Return all choices of one option from each list, or a random sample if there are more than
    `most`; the seed determines the sample."""
    if math.prod(map(len, choices)) <= most:
        return list(itertools.product(*choices))
    generator = random.Random(seed)
    found = {tuple(generator.randrange(len(each)) for each in choices) for _ in range(most)}
    return [
        tuple(each[at] for each, at in zip(choices, picked, strict=True))
        for picked in sorted(found)
    ]
