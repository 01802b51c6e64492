"""Interpolation and sampling of planes that are split."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.rules import check_modules, in_layout, values
from torch import nn

import shardwise as sw
from shardwise.comm import Event, listen
from shardwise.testing import Sample, check_rule

MESHES = ((2,), (4,), (2, 3))


def check(function: Callable[..., Any], *samples: Sample, most: int = 12) -> None:
    check_rule(function, samples, mesh_shapes=MESHES, most=most)


def test_a_split_plane_grows_where_it_lies() -> None:
    def run() -> tuple[Any, ...]:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = in_layout(torch.tensor([[[0.0, 4.0, 8.0, 12.0]]]), mesh, sw.Shard(2))
        events: list[Event] = []
        with listen(events.append):
            repeated = F.interpolate(x, scale_factor=2)
            between = F.interpolate(x, scale_factor=2, mode="linear")
        kinds = [event.kind for event in events if event.rank == mesh.get_rank()]
        return repeated.to_local().tolist(), between.to_local().tolist(), kinds

    first, second = sw.simulate(run, 2)
    # only the second looks at a neighbour
    assert first == ([[[0, 0, 4, 4]]], [[[0, 1, 3, 5]]], ["all_to_all"])
    assert second == ([[[8, 8, 12, 12]]], [[[7, 9, 11, 12]]], ["all_to_all"])


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_planes(mode: str) -> None:
    input = values(2, 3, 5, 4)
    check(
        F.interpolate,
        Sample(input, scale_factor=(2, 3), mode=mode),
        Sample(input, size=(3, 12), mode=mode),
        Sample(values(1, 2, 5, 5), scale_factor=1.5, mode=mode),
        most=10,
    )


@pytest.mark.slow
def test_other_modes_and_numbers_of_dims() -> None:
    line, cube = values(2, 3, 5), values(1, 2, 3, 2, 4)
    check(
        F.interpolate,
        Sample(line, scale_factor=2),
        Sample(line, scale_factor=3, mode="linear"),
        Sample(line, size=9, mode="linear", align_corners=True),
        Sample(cube, scale_factor=2),
        Sample(cube, scale_factor=2.0, mode="trilinear"),
        Sample(values(1, 2, 6, 4), size=(3, 2), mode="area"),
        Sample(values(1, 2, 3, 4), scale_factor=2, mode="bilinear", antialias=True),
        Sample(values(1, 2, 7, 3), scale_factor=2, mode="bicubic", antialias=True),
        most=12,
    )


def test_builtin_functions() -> None:
    input = values(1, 2, 3, 4)
    check(
        torch._C._nn.upsample_nearest2d,
        Sample(input, [6, 8], 2.0, 2.0),
        Sample(input, [6, 8], None),
        most=10,
    )
    check(torch.ops.aten.upsample_bilinear2d.default, Sample(input, [6, 5], False), most=10)


def test_grid_sample() -> None:
    def sampled(input: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(input, grid, align_corners=False, padding_mode="border")

    check(
        sampled,
        Sample(values(2, 3, 5, 4), values(2, 3, 2, 2)),
        Sample(values(1, 2, 3, 4, 2), values(1, 3, 2, 2, 3)),
        most=10,
    )


def test_affine_grid() -> None:
    check(
        F.affine_grid,
        Sample(values(3, 2, 3), [3, 2, 4, 5], align_corners=False),
        Sample(values(2, 3, 4), [2, 1, 2, 3, 2], align_corners=True),
        most=10,
    )


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_modules(dim: int) -> None:
    modules = [nn.Upsample(scale_factor=2), nn.UpsamplingBilinear2d(size=(7, 9))]
    check_modules(modules, values(3, 4, 5, 5), dim)
