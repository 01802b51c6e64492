"""Reductions give what one process gives, whatever is split; sums and means stay pending."""

from __future__ import annotations

import pytest
import torch
from support.rules import heard, in_layout, ranks, values, with_zeros

from shardwise import DeviceMesh, DTensor, Partial, Replicate, Shard, init_device_mesh, simulate
from shardwise.core.layout import Layout
from shardwise.testing import Sample, check_rule, distributed


def with_nan(*shape: int) -> torch.Tensor:
    x = values(*shape).detach().clone()
    x.view(-1)[::3] = float("nan")
    return x.requires_grad_()


X = values(5, 4)
ROWS = values(2, 3)

DIMS = [
    Sample(X),
    Sample(X, 0),
    Sample(X, dim=-1, keepdim=True),
    Sample(X, (1, 0)),
    Sample(ROWS, [0], True),
    Sample(X, axis=0, keepdims=True),
    Sample(values(0, 3), 0),
]


@pytest.mark.parametrize("function", [torch.sum, torch.Tensor.mean, torch.nansum, torch.nanmean])
def test_sums_and_means_over_any_dims(function):
    check_rule(function, DIMS, most=12, allow_missing=function is torch.nanmean)


def test_other_spellings_and_dtypes():
    check_rule(lambda x: x.sum(0, dtype=torch.float32), [Sample(X)], most=12)
    check_rule(lambda x: x.sum(0, dtype=torch.int32), [Sample(9 * X.detach())], most=12)
    check_rule(lambda x: x.mean(dtype=torch.float64), [Sample(X), Sample(torch.arange(5))], most=12)
    check_rule(torch.ops.aten.sum.dim_IntList, [Sample(X, [0])], most=12)
    check_rule(lambda x: torch.ops.aten.mean.default(self=x), [Sample(X)], most=12)
    check_rule(torch.mean, [Sample(X.detach().to(torch.complex128).requires_grad_(), 0)], most=12)
    check_rule(torch.sum, [Sample(torch.tensor(3.0)), Sample(torch.tensor(3.0), 0)], most=12)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32])
def test_sums_of_integers_are_int64(dtype):
    x = (X.detach().abs() * 3).to(dtype)
    for function in (torch.sum, torch.count_nonzero, torch.prod):
        check_rule(function, [Sample(x), Sample(x, 0)], most=12, allow_missing=True)


@pytest.mark.parametrize("function", [torch.nansum, torch.nanmean])
def test_nan_is_left_out(function):
    x = with_nan(5, 4)
    check_rule(
        function, [Sample(x), Sample(x, 0), Sample(x, -1, True)], most=12, allow_missing=True
    )


@pytest.mark.parametrize("x", [X, with_zeros(5, 4), ROWS])
def test_products_have_the_right_gradient_also_where_there_are_zeros(x):
    samples = [Sample(x), Sample(x, 0), Sample(x, dim=1, keepdim=True)]
    check_rule(torch.prod, samples, most=12, allow_missing=True)


@pytest.mark.parametrize("function", [torch.all, torch.any])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float64])
def test_all_and_any(function, dtype):
    x = torch.tensor([[1, 0, 1], [1, 0, 0], [1, 0, 1], [1, 0, 1], [1, 0, 1]])
    samples = [Sample(x), Sample(x, 0), Sample(x, (0, 1)), Sample(x, -1, True), Sample(x, ())]
    check_rule(lambda x, *given: function(x.to(dtype), *given), samples, allow_missing=True)


def test_trace_and_sum_to_size():
    check_rule(torch.trace, [Sample(X), Sample(values(2, 5))], most=25)
    check_rule(torch.Tensor.sum_to_size, [Sample(X, 5, 1), Sample(X, (4,)), Sample(X, 1)], most=12)


def test_a_split_sum_is_pending_and_communicates_nothing():
    def run() -> tuple[object, float, object]:
        mesh = init_device_mesh("cpu", (2,))
        x = distributed(torch.arange(5.0), Layout(mesh, (5,), {0: (0,)}))
        return x.sum().placements, x.mean().item(), x.max().placements

    assert simulate(run, 2) == [((Partial(),), 2.0, (Replicate(),))] * 2


def test_the_mean_divides_by_the_global_count():
    def run() -> float:
        mesh = init_device_mesh("cpu", (4,))
        x = distributed(torch.tensor([1.0, 2, 3, 4, 10]), Layout(mesh, (5,), {0: (0,)}))
        return x.mean().to_local().item()

    # the shards are [1, 2], [3, 4], [10], []
    assert simulate(run, 4) == pytest.approx([3 / 5, 7 / 5, 2, 0])


def test_a_mean_of_halves_does_not_overflow():
    def run() -> float:
        mesh = init_device_mesh("cpu", (2,))
        x = torch.full((4000,), 100.0, dtype=torch.float16)
        return distributed(x, Layout(mesh, (4000,), {0: (0,)})).mean().item()

    assert simulate(run, 2) == [100.0, 100.0]


def test_what_torch_refuses_is_refused_in_its_words():
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distributed(torch.arange(4), Layout(mesh, (4,), {0: (0,)}))
        with pytest.raises(RuntimeError, match="could not infer output dtype"):
            x.mean()
        with pytest.raises(IndexError, match="Dimension out of range"):
            x.sum(3)
        with pytest.raises(RuntimeError, match=r"multiple times|duplicate"):
            x.sum((0, -1))

    simulate(run, 2)


@pytest.mark.parametrize("function", [torch.sum, torch.mean, torch.prod, torch.trace])
def test_autocast_gives_the_dtype_of_plain_torch(function):
    x = X.detach().bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = function(x).dtype

    def run() -> torch.dtype:
        mesh = init_device_mesh("cpu", (2,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(distributed(x, Layout(mesh, (5, 4), {0: (0,)}))).dtype

    assert simulate(run, 2) == [expected] * 2


def test_double_backward_of_a_split_product():
    def second(x: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(torch.prod(x), x, create_graph=True)
        (again,) = torch.autograd.grad((gradient * gradient).sum(), x)
        return again

    x = X.detach()[:, 0].clone().requires_grad_()
    expected = second(x)

    def run() -> torch.Tensor:
        mesh = init_device_mesh("cpu", (3,))
        again = second(distributed(x, Layout(mesh, (5,), {0: (0,)})))
        assert isinstance(again, DTensor) and again.placements == (Shard(0),)
        return again.full_tensor()

    for got in simulate(run, 3):
        torch.testing.assert_close(got, expected)


def test_a_hash_over_split_dims_is_made_of_the_ranks_own() -> None:
    samples = [Sample(values(5, 4, grad=False)), Sample(torch.arange(20).reshape(5, 4), dim=0)]
    check_rule(torch.hash_tensor, samples, gradients=False, allow_missing=True)

    def run(mesh: DeviceMesh) -> None:
        x = in_layout(values(6, 4), mesh, Shard(0))
        events, _ = heard(mesh, lambda: torch.hash_tensor(x, dim=0))
        assert [(event.kind, event.shape) for event in events] == [("all_gather", (1, 4))]

    ranks(run)


def test_segments_are_free_in_every_other_dim() -> None:
    lengths = torch.tensor([[1, 2, 3], [2, 4, 0], [6, 0, 0]])
    for how in ("sum", "max"):
        samples = [
            Sample(values(6, 2), how, lengths=lengths[0], axis=0),
            Sample(values(3, 6, 2), how, lengths=lengths, axis=1, initial=1.0),
        ]
        # Its kernel does not survive lengths that do not fit, so splits are not tried by hand.
        check_rule(torch.segment_reduce, samples, mesh_shapes=((3,),), most=20, allow_missing=True)
