"""Running sums and their like, along split dims and beside them."""

from __future__ import annotations

import pytest
import torch
from rule_cases import values

from shardwise import Shard, init_device_mesh, listen, simulate
from shardwise.layout import Layout
from shardwise.testing import Sample, check_rule, distributed


def with_zeros(*shape: int) -> torch.Tensor:
    x = values(*shape).detach().clone()
    x[1, 1] = 0
    x[3, 1] = 0
    x[0, 2] = 0
    return x.requires_grad_()


X = values(5, 4)
SMALL = values(2, 3)


def test_running_sums():
    samples = [Sample(X, 0), Sample(X, dim=-1), Sample(SMALL, 0), Sample(X, axis=0)]
    check_rule(torch.cumsum, samples, most=15, allow_missing=True)
    check_rule(torch.Tensor.cumsum, [Sample(torch.arange(5) > 2, 0)], most=12, allow_missing=True)
    check_rule(lambda x: x.cumsum(0, dtype=torch.float32), [Sample(X)], most=12, allow_missing=True)
    check_rule(torch.cumsum, [Sample(torch.tensor(2.0), 0)])


def test_running_products_also_with_zeros():
    samples = [Sample(X, 0), Sample(with_zeros(5, 4), 0), Sample(with_zeros(5, 4), -1)]
    check_rule(torch.cumprod, samples, most=15, allow_missing=True)


def test_in_place():
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y.cumsum_(0)
        return y.cumprod_(1)

    check_rule(run, [Sample(X)], most=12, allow_missing=True)


def test_a_running_sum_gathers_only_the_totals_of_the_ranks():
    def run() -> tuple[set[str], list[float], object]:
        mesh = init_device_mesh("cpu", (2,))
        x = distributed(torch.arange(1.0, 6), Layout(mesh, (5,), {0: (0,)}))
        events = []
        with listen(events.append):
            y = x.cumsum(0)
        return {each.kind for each in events}, y.to_local().tolist(), y.placements

    assert simulate(run, 2) == [
        ({"all_gather"}, [1.0, 3.0, 6.0], (Shard(0),)),
        ({"all_gather"}, [10.0, 15.0], (Shard(0),)),
    ]


def test_double_backward_of_a_running_product():
    def second(x: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(x.cumprod(0).sum(), x, create_graph=True)
        (again,) = torch.autograd.grad((gradient * gradient).sum(), x)
        return again

    def run() -> torch.Tensor:
        mesh = init_device_mesh("cpu", (3,))
        return second(distributed(X, Layout(mesh, (5, 4), {0: (0,)}))).full_tensor()

    for got in simulate(run, 3):
        torch.testing.assert_close(got, second(X))


@pytest.mark.parametrize("function", [torch.cummax, torch.cummin, torch.logcumsumexp])
def test_what_needs_its_dim_whole_leaves_the_others_split(function):
    check_rule(function, [Sample(X, 0), Sample(SMALL, dim=-1)], most=15)


def test_differences_and_integrals():
    ends = [values(1, 4), values(2, 4)]
    samples = [Sample(X), Sample(X, 2, 0), Sample(X, dim=0, prepend=ends[0], append=ends[1])]
    check_rule(torch.diff, samples, most=15, allow_missing=True)
    samples = [Sample(X), Sample(X, values(4)), Sample(X, dx=0.5, dim=0), Sample(X, values(5, 4))]
    samples += [Sample(X, values(1, 4))]
    check_rule(torch.trapz, samples, most=15, allow_missing=True)
    check_rule(torch.cumulative_trapezoid, samples, most=15, allow_missing=True)
