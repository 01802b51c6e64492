"""Largest and smallest: values, global indices and torch's gradients, whatever is split."""

from __future__ import annotations

import math

import pytest
import torch
from support.rules import check_second_order, heard, in_layout, ranks, values

from shardwise import DeviceMesh, Replicate, Shard, init_device_mesh, simulate
from shardwise.core.layout import Layout
from shardwise.testing import Sample, check_rule, distributed

NAN = float("nan")


def tied(*shape: int) -> torch.Tensor:
    """Many equal elements; exact in every Partial layout too is impossible, so int64."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 3, shape, generator=generator)


X = values(5, 4)
SMALL = values(2, 3)
TIED = tied(5, 4)


@pytest.mark.parametrize("function", [torch.amax, torch.Tensor.amin])
def test_amax_and_amin(function):
    samples = [Sample(X), Sample(X, 0), Sample(X, (0, -1), True), Sample(SMALL, dim=-1)]
    check_rule(function, samples, most=12, allow_missing=True)


def test_aminmax():
    samples = [Sample(X), Sample(X, dim=0), Sample(SMALL, dim=1, keepdim=True)]
    check_rule(torch.aminmax, samples, most=12, allow_missing=True)


@pytest.mark.parametrize("function", [torch.max, torch.Tensor.min])
def test_max_and_min(function):
    samples = [Sample(X), Sample(X, 0), Sample(X, dim=-1, keepdim=True), Sample(SMALL, 0)]
    samples += [Sample(TIED, 0), Sample(TIED, 1), Sample(TIED), Sample(torch.tensor(2.0), 0)]
    samples += [Sample(TIED > 0, 0), Sample(TIED.to(torch.uint8), 0)]
    check_rule(function, samples, most=12, allow_missing=True)


@pytest.mark.parametrize("function", [torch.max, torch.min])
def test_the_larger_of_two_tensors(function):
    check_rule(function, [Sample(X, values(4)), Sample(X, other=values(5, 1))], most=25)
    check_rule(torch.ops.aten.max.other, [Sample(X, values(4))], most=12)


@pytest.mark.parametrize("function", [torch.argmax, torch.Tensor.argmin])
def test_indices_are_global_and_of_the_first(function):
    samples = [Sample(X), Sample(X, 0), Sample(X, -1, True), Sample(SMALL, None, True)]
    samples += [Sample(TIED), Sample(TIED, 0), Sample(TIED, dim=1), Sample(tied(2, 3), axis=0)]
    check_rule(function, samples, most=12, allow_missing=True)


def test_aten_spellings():
    aten = torch.ops.aten
    check_rule(aten.amax.default, [Sample(X, [0])], most=12, allow_missing=True)
    check_rule(aten.max.dim, [Sample(X, 0)], most=12, allow_missing=True)
    check_rule(lambda x: aten.max.default(self=x), [Sample(X)], most=12, allow_missing=True)


@pytest.mark.parametrize(
    "function",
    [torch.amax, torch.max, torch.amin, torch.min, lambda x: x.max(0)[0], lambda x: x.min(0)[0]],
)
@pytest.mark.parametrize(
    "values",
    [
        [3.0, 1, 3, 3, 2, 3, 1],
        [3.0, NAN, 1, NAN, 2, NAN, 2],
        [math.inf, 1, -math.inf, math.inf, -math.inf, 2, math.inf],
        [-math.inf] * 7,
    ],
)
def test_gradients_of_equals_and_of_nan_are_torchs(function, values):
    x = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(function(x), x)

    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for axes in ((0,), (1, 0)):
            local = distributed(x, Layout(mesh, (7,), {0: axes}))
            result = function(local)
            torch.testing.assert_close(result.full_tensor(), function(x), equal_nan=True)
            (gradient,) = torch.autograd.grad(result, local)
            torch.testing.assert_close(gradient.full_tensor(), expected, equal_nan=True)

    simulate(run, 4)


@pytest.mark.parametrize("values", [[1.0, NAN, 2, NAN, 0], [-math.inf] * 5, [2.0, 5, 5, 1, 5]])
def test_indices_where_pieces_are_empty_or_nan(values):
    x = torch.tensor(values)

    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 4))  # pieces 1 1 1 0, 1 1 0 0
        local = distributed(x, Layout(mesh, (5,), {0: (0, 1)}))
        for function in (torch.argmax, torch.argmin, lambda x: x.max(0)[1], lambda x: x.min(0)[1]):
            found = function(local)
            assert found.placements == (Replicate(), Replicate())
            assert found.item() == function(x).item()

    simulate(run, 8)


def test_there_is_no_largest_of_nothing():
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distributed(torch.zeros(0, 3), Layout(mesh, (0, 3), {0: (0,)}))
        for function in (torch.amax, torch.max, torch.argmax):
            with pytest.raises((RuntimeError, IndexError)):
                function(x)
            with pytest.raises((RuntimeError, IndexError)):
                function(x, 0)
        assert tuple(torch.amax(x, 1).shape) == (0,)

    simulate(run, 2)


@pytest.mark.parametrize("function", [torch.max, torch.amax])
def test_only_a_maximum_that_needs_a_gradient_counts_the_equal_elements_of_all_ranks(function):
    def run(mesh: DeviceMesh) -> None:
        x = in_layout(X, mesh, Shard(0))
        assert len(heard(mesh, lambda: function(x))[0]) == 2
        assert len(heard(mesh, lambda: function(x.detach()))[0]) == 1
        with torch.no_grad():
            assert len(heard(mesh, lambda: function(x))[0]) == 1

    ranks(run)


def test_the_gradient_of_the_gradient_of_max():
    check_second_order(lambda x: x.max(0)[0] ** 3 + x.amax(0) ** 2, X)


def test_what_picks_by_rank_keeps_the_other_dims_split():
    three = values(5, 3, 2)
    check_rule(torch.median, [Sample(three), Sample(three, 1), Sample(X, 0, True)], most=12)
    check_rule(torch.nanmedian, [Sample(X), Sample(X, dim=-1)], most=12)
    check_rule(torch.mode, [Sample(TIED), Sample(TIED, 0, True)], most=12)
    check_rule(torch.kthvalue, [Sample(X, 2), Sample(X, 2, 0, True)], most=12)
    q = torch.tensor([0.2, 0.7], dtype=torch.float64, requires_grad=True)
    samples = [Sample(X, 0.3), Sample(X, 0.3, 0, True), Sample(X, q, 1), Sample(X, q, keepdim=True)]
    check_rule(torch.quantile, samples, most=12)
    check_rule(torch.nanquantile, [Sample(X, q, dim=1, interpolation="midpoint")], most=12)
