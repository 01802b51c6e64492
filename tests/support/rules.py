"""Values, DTensors of them on simulated ranks, and the collectives of a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.comm import Event, listen
from shardwise.testing import distributed

_drawn = torch.Generator().manual_seed(1)


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return a leaf of normal numbers, other ones at every call: for samples."""
    return torch.randn(shape, generator=_drawn, dtype=dtype).requires_grad_()


def values(
    *shape: int, seed: int = 0, grad: bool = True, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Return a leaf of normal numbers that depend on the arguments only: each rank can make it."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(grad)


def full(*shape: int) -> torch.Tensor:
    """Return 1, 2, 3, ... in this shape."""
    return torch.arange(1.0, math.prod(shape) + 1).reshape(shape)


def ranks(
    run: Callable[[sw.DeviceMesh], Any], count: int = 2, shape: Sequence[int] | None = None
) -> list[Any]:
    """Run `run(mesh)` on simulated ranks; return the results by rank."""
    return sw.simulate(lambda: run(sw.init_device_mesh("cpu", shape or (count,))), count)


def in_layout(x: torch.Tensor, mesh: sw.DeviceMesh, *placements: sw.Placement) -> sw.DTensor:
    """Distribute a tensor that every rank has, as contributions where it is pending; a leaf."""
    return distributed(x, sw.Layout.from_placements(mesh, x.shape, placements))


def split(
    tensor: torch.Tensor, mesh: sw.DeviceMesh, *placements: sw.Placement, **options: Any
) -> sw.DTensor:
    """Distribute a tensor that every rank has."""
    return sw.distribute_tensor(tensor, mesh, placements, src_data_rank=None, **options)


def heard(mesh: sw.DeviceMesh, call: Callable[[], Any]) -> tuple[list[Event], Any]:
    """Return the collectives that this rank takes part in during a call, and the call's result."""
    events: list[Event] = []
    with listen(events.append):
        result = call()
    return [event for event in events if event.rank == mesh.get_rank()], result


def with_zeros(*shape: int) -> torch.Tensor:
    """Return `values` with two zeros in one column and one in another."""
    x = values(*shape).detach().clone()
    x[1, 1] = 0
    x[3, 1] = 0
    x[0, 2] = 0
    return x.requires_grad_()


def check_second_order(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """Compare the gradient of the squared gradient, with dim 0 split over three ranks."""

    def second(x: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        (again,) = torch.autograd.grad((gradient * gradient).sum(), x)
        return again

    def run(mesh: sw.DeviceMesh) -> torch.Tensor:
        return second(in_layout(x, mesh, sw.Shard(0))).full_tensor()

    for got in ranks(run, 3):
        torch.testing.assert_close(got, second(x))


def check_modules(modules: Sequence[nn.Module], x: torch.Tensor, dim: int) -> None:
    """Compare modules on a tensor that is split over ranks with the same on the whole tensor."""

    def run(mesh: sw.DeviceMesh) -> None:
        for module in modules:
            made = module(in_layout(x, mesh, sw.Shard(dim))).full_tensor()
            torch.testing.assert_close(made, module(x), rtol=1e-10, atol=1e-12)

    ranks(run, 4)
