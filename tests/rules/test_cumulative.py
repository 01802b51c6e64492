"""Running sums and their like, along split dims and beside them."""

from __future__ import annotations

import pytest
import torch
from support.rules import check_second_order, values, with_zeros

from shardwise import Shard, init_device_mesh, listen, simulate
from shardwise.core.layout import Layout
from shardwise.testing import Sample, check_rule, distributed

X = values(5, 4)
SMALL = values(2, 3)


def test_running_sums():
    samples = [Sample(X, 0), Sample(X, dim=-1), Sample(SMALL, 0), Sample(X, axis=0)]
    check_rule(torch.cumsum, samples, most=15, allow_missing=True)
    check_rule(torch.Tensor.cumsum, [Sample(torch.arange(5) > 2, 0)], most=12, allow_missing=True)
    check_rule(lambda x: x.cumsum(0, dtype=torch.float32), [Sample(X)], most=12, allow_missing=True)
    check_rule(torch.cumsum, [Sample(torch.tensor(2.0), 0)])
    samples = [Sample(3 * X.detach())]
    check_rule(lambda x: x.cumsum(0, dtype=torch.int64), samples, most=12, allow_missing=True)


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


def test_running_sums_have_the_dtype_that_is_asked_for():
    x = torch.arange(5, dtype=torch.int32)
    for function in (torch.cumsum, torch.cumprod):
        check_rule(function, [Sample(x, 0, dtype=torch.int32)], most=6, allow_missing=True)


@pytest.mark.parametrize("function", [torch.cumprod, torch.logcumsumexp])
def test_double_backward_along_a_split_dim(function):
    check_second_order(lambda x: function(x, 0), X)


@pytest.mark.parametrize("function", [torch.cummax, torch.cummin, torch.logcumsumexp])
def test_running_extremes_along_a_split_dim(function):
    check_rule(function, [Sample(X, 0), Sample(SMALL, dim=-1)], most=12)


def test_running_sums_of_logarithms_keep_their_turns():
    turns = torch.complex(X.detach()[:, 0], torch.arange(5.0).double() * 2)
    check_rule(torch.logcumsumexp, [Sample(turns, 0)], most=8, allow_missing=True)


@pytest.mark.parametrize("function", [torch.cummax, torch.cummin])
def test_of_equal_extremes_the_last_counts_and_nan_stays(function):
    nan = float("nan")
    samples = [Sample(torch.tensor(each), 0) for each in ([3, 1, 3, 3], [2.0, 1, nan, 0, nan, 3])]
    # Of 4 over 2 and 3, ranks in the middle have nothing.
    check_rule(function, samples, mesh_shapes=((3,), (2, 3)), most=12, allow_missing=True)
