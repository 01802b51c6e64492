"""Softmax along whole and split dims."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.rules import heard, in_layout, ranks, values

import shardwise as sw
from shardwise.testing import Sample, check_rule, distributed

MESHES = ((3,), (2, 2))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_every_layout_gives_torchs_values_and_gradients(name: str) -> None:
    for function in (getattr(torch, name), getattr(F, name), getattr(torch.Tensor, name)):
        check_rule(
            function,
            [Sample(values(5, 4), dim=1), Sample(values(5, 2, 4), dim=-2)],
            mesh_shapes=MESHES,
            most=12,
        )


def test_a_dtype_is_that_of_the_result() -> None:
    samples = [
        Sample(values(5, 4).float(), 0, dtype=torch.float64),
        Sample(torch.arange(6).reshape(2, 3), 1, torch.float32),
    ]
    for function in (torch.softmax, torch.log_softmax):
        check_rule(function, samples, mesh_shapes=((2,),), allow_missing=True, rtol=1e-6)
    samples = [Sample(values(5, 4).float(), 0, 3, torch.float64)]
    check_rule(F.softmax, samples, mesh_shapes=((2,),), rtol=1e-6)


def test_a_scalar_has_a_softmax() -> None:
    check_rule(torch.softmax, [Sample(values(), 0)], mesh_shapes=((2,),))


def test_along_a_split_dim_only_a_maximum_and_a_sum_travel() -> None:
    def run(mesh: sw.DeviceMesh) -> list[Any]:
        x = in_layout(values(2, 50), mesh, sw.Shard(1))
        events, _ = heard(mesh, lambda: torch.softmax(x, 1))
        return [(event.kind, event.shape) for event in events]

    assert ranks(run, 3) == [[("all_reduce", (2, 1))] * 2] * 3


def test_minus_infinity_has_no_share_and_a_row_of_it_is_nan() -> None:
    x = torch.tensor([[-torch.inf, 1.0, 2.0], [-torch.inf] * 3], dtype=torch.float64)

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (3,))
        for function in (torch.softmax, torch.log_softmax):
            layout = sw.Layout.from_placements(mesh, x.shape, [sw.Shard(1)])
            got = function(distributed(x, layout), 1).full_tensor()
            torch.testing.assert_close(got, function(x, 1), equal_nan=True)

    sw.simulate(run, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_rounded_once(dtype: torch.dtype) -> None:
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).to(dtype)

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        layout = sw.Layout.from_placements(mesh, x.shape, [sw.Shard(1)])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, want = torch.softmax(distributed(x, layout), 1), torch.softmax(x, 1)
        assert got.dtype == want.dtype == dtype
        close = torch.finfo(dtype).eps
        torch.testing.assert_close(got.full_tensor(), want, rtol=close, atol=0)

    sw.simulate(run, 2)


def test_softmax_can_be_differentiated_twice_along_a_split_dim() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x, 1)
        (first,) = torch.autograd.grad(y, x, y * y, create_graph=True)
        return first

    x = values(3, 5)
    (want,) = torch.autograd.grad(twice(x), x, torch.ones_like(x) + x)

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (3,))
        layout = sw.Layout.from_placements(mesh, x.shape, [sw.Shard(1)])
        here = distributed(x, layout)
        weights = distributed(torch.ones_like(x) + x, layout)
        (got,) = torch.autograd.grad(twice(here), here, weights)
        torch.testing.assert_close(got.full_tensor(), want)

    sw.simulate(run, 3)


def test_the_safe_one_gives_zeros_where_all_is_masked_and_others_nan() -> None:
    x = torch.tensor([[1.0, -torch.inf, 2.0], [-torch.inf] * 3], dtype=torch.float64)
    want = torch.tensor([[1.0, 0.0, torch.e], [0.0, 0.0, 0.0]], dtype=torch.float64) / (1 + torch.e)

    def run(mesh: sw.DeviceMesh) -> None:
        for dim in (0, 1):
            here = in_layout(x, mesh, sw.Shard(dim))
            safe = torch.ops.aten._safe_softmax.default(here, 1)
            torch.testing.assert_close(safe.full_tensor(), want)
            assert torch.softmax(here, 1).full_tensor()[1].isnan().all()

    ranks(run)


@pytest.mark.parametrize("name", ["_softmax_backward_data", "_log_softmax_backward_data"])
def test_of_a_backward_along_a_split_dim_one_sum_travels(name: str) -> None:
    backward = getattr(torch.ops.aten, name)
    saved = values(5, 4, grad=False).softmax(1).requires_grad_()
    sample = Sample(values(5, 4, seed=1), saved, 1, torch.float64)
    check_rule(backward, [sample], mesh_shapes=MESHES, most=12)

    def run(mesh: sw.DeviceMesh) -> None:
        grad, output = (in_layout(each, mesh, sw.Shard(1)) for each in (values(5, 4), saved))
        with torch.no_grad():
            events, _ = heard(mesh, lambda: backward(grad, output, 1, torch.float64))
        assert [(event.kind, event.shape) for event in events] == [("all_reduce", (5, 1))]

    ranks(run)
