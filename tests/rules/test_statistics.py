"""Variances, norms, logsumexp and distances: as in one process, whatever is split."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from shardwise import init_device_mesh, simulate
from shardwise.core.layout import Layout
from shardwise.testing import Sample, check_rule, distributed

INF = math.inf


def matrix(*shape: int, shift: float = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=generator, dtype=torch.float64).add_(shift).requires_grad_()


X = matrix(5, 4)
SMALL = matrix(2, 3)
COMPLEX = torch.view_as_complex(matrix(5, 2, 2).detach()).requires_grad_()


# ---- variances


@pytest.mark.parametrize("function", [torch.var, torch.Tensor.std])
def test_variances_over_any_dims(function):
    samples = [
        Sample(X),
        Sample(X, False),
        Sample(X, 0, False, True),
        Sample(X, (0, 1), correction=2),
        Sample(X, dim=-1, unbiased=False),
        Sample(matrix(2, 5), 0),
        Sample(COMPLEX, 0),
    ]
    check_rule(function, samples, most=12, allow_missing=True)


@pytest.mark.parametrize("function", [torch.var_mean, torch.std_mean])
def test_variances_with_their_means(function):
    samples = [Sample(X), Sample(X, 0), Sample(X, (1,), correction=0, keepdim=True)]
    check_rule(function, samples, most=12, allow_missing=True)
    correction = torch.ops.aten.var_mean.correction
    check_rule(correction, [Sample(X, [0], correction=1)], most=12, allow_missing=True)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
@pytest.mark.parametrize("correction", [5, 6])
def test_a_variance_without_degrees_of_freedom_and_its_gradient_are_infinite_as_torchs(correction):
    samples = [Sample(X, 0, correction=correction, keepdim=keepdim) for keepdim in (True, False)]
    check_rule(torch.var, samples, most=12, allow_missing=True)


def test_a_variance_far_from_zero_is_as_exact_as_torchs():
    x = matrix(40, shift=1e8).detach()

    def run() -> float:
        mesh = init_device_mesh("cpu", (3,))
        return distributed(x, Layout(mesh, (40,), {0: (0,)})).var().item()

    assert simulate(run, 3) == pytest.approx([x.var().item()] * 3, rel=1e-6)


def test_a_standard_deviation_of_zero_has_the_gradient_zero():
    def run() -> tuple[float, list[float]]:
        mesh = init_device_mesh("cpu", (2,))
        x = distributed(torch.full((4,), 3.0, requires_grad=True), Layout(mesh, (4,), {0: (0,)}))
        result = x.std()
        result.backward()
        return result.item(), x.grad.full_tensor().tolist()

    assert simulate(run, 2) == [(0.0, [0.0] * 4)] * 2


@pytest.mark.parametrize(
    "function",
    [
        torch.var,
        torch.std,
        torch.linalg.vector_norm,
        lambda x: torch.linalg.vector_norm(x, 3),
        lambda x: (x.amax() * x).sum(),
        lambda x: (x.max(0).values * x).sum(),
    ],
)
def test_double_backward(function):
    def second(x: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(function(x), x, create_graph=True)
        (again,) = torch.autograd.grad((gradient**3).sum(), x)
        return again

    def run() -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", (2, 3))
        orders = {0: (1,), 1: (0,)}, {1: (0, 1)}  # of 4 over 2 and 3, some ranks have nothing
        made = [second(distributed(X, Layout(mesh, (5, 4), order))) for order in orders]
        return [each.full_tensor() for each in made]

    for got in simulate(run, 6):
        torch.testing.assert_close(got, [second(X)] * 2)


# ---- norms


@pytest.mark.parametrize("order", [0, 0.5, 1, 2, 3, -1, INF, -INF])
def test_vector_norms(order):
    samples = [
        Sample(X, order),
        Sample(X, order, 0),
        Sample(SMALL, ord=order, dim=(-1,), keepdim=True),
    ]
    check_rule(torch.linalg.vector_norm, samples, most=12, allow_missing=True)


def test_norms_of_half_types_and_of_complex_numbers():
    check_rule(torch.linalg.vector_norm, [Sample(COMPLEX, 2), Sample(COMPLEX, 1, 0)], most=12,
               allow_missing=True)  # fmt: skip
    half = X.detach().half()

    def run() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distributed(half, Layout(mesh, (5, 4), {0: (0,)}))
        for dtype in (None, torch.float32):
            torch.testing.assert_close(
                torch.linalg.vector_norm(x, dtype=dtype).full_tensor(),
                torch.linalg.vector_norm(half, dtype=dtype),
            )

    simulate(run, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:at..nuclear_norm is deprecated")
def test_the_other_spellings_of_norms():
    def check(function, *samples):
        check_rule(function, samples, most=12, allow_missing=True)

    check(torch.norm, Sample(X), Sample(X, 1), Sample(X, 2, 0), Sample(X, "fro", (0, 1), True))
    check(torch.Tensor.norm, Sample(X), Sample(X, dim=0), Sample(X, p=3, dim=1, keepdim=True))
    check(lambda x: x.norm(dtype=torch.float64), Sample(X))
    check(torch.ops.aten.norm.ScalarOpt_dim, Sample(X, 2, [0]))
    check(torch.ops.aten.linalg_vector_norm.default, Sample(X, 2, [0]))
    check(torch.linalg.norm, Sample(X), Sample(X, 2, 0), Sample(X, "fro"), Sample(X, 1))
    check(torch.norm, Sample(X, "nuc"), Sample(X, "nuc", (0, 1)))


@pytest.mark.parametrize("order", ["fro", "nuc", 1, -1, 2, INF, -INF])
def test_matrix_norms(order):
    three = matrix(2, 5, 3)
    samples = [Sample(X, order), Sample(three, order, (0, 2), True)]
    check_rule(torch.linalg.matrix_norm, samples, most=12, allow_missing=True)


def test_a_norm_of_zero_has_the_gradient_zero_and_equals_share_it():
    def gradient(x: torch.Tensor, order: float) -> torch.Tensor:
        (found,) = torch.autograd.grad(torch.linalg.vector_norm(x, order), x)
        return found

    def run() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for values in ([0.0] * 5, [1.0, -2, 2, -2, 0], [0.0, 0, 0, 1, 2]):
            x = torch.tensor(values, dtype=torch.float64, requires_grad=True)
            local = distributed(x, Layout(mesh, (5,), {0: (0,)}))
            for order in (1, 1.5, 2, 3, INF):
                torch.testing.assert_close(gradient(local, order).full_tensor(), gradient(x, order))

    simulate(run, 2)


# ---- logsumexp


def test_logsumexp():
    samples = [Sample(X, 0), Sample(X, (0, 1), True), Sample(SMALL, -1), Sample(torch.arange(5), 0)]
    check_rule(torch.logsumexp, samples, most=12, allow_missing=True)


def test_logsumexp_of_infinities_and_of_large_numbers():
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for values in ([-INF, -INF, -INF, 1, 2], [1000.0, 1001, 0, 0, 999], [INF, 0, 0, 0, 0],
                       [-INF] * 5):  # fmt: skip
            x = torch.tensor(values, dtype=torch.float64, requires_grad=True)
            local = distributed(x, Layout(mesh, (5,), {0: (0,)}))
            want, got = x.logsumexp(0), local.logsumexp(0)
            torch.testing.assert_close(got.full_tensor(), want)
            (expected,) = torch.autograd.grad(want, x)
            (gradient,) = torch.autograd.grad(got, local)
            torch.testing.assert_close(gradient.full_tensor(), expected, equal_nan=True)

    simulate(run, 2)


# ---- made of these


@pytest.mark.parametrize(
    ("function", "samples"),
    [
        (F.normalize, [Sample(X), Sample(X, 1, 0)]),
        (F.cosine_similarity, [Sample(X, matrix(5, 4, shift=1)), Sample(X, matrix(1, 4), 0)]),
        (F.pairwise_distance, [Sample(X, matrix(4)), Sample(X, matrix(5, 4, shift=1), 1)]),
        (torch.dist, [Sample(X, matrix(4)), Sample(X, matrix(5, 4, shift=1), 3)]),
        (torch.renorm, [Sample(X, 2, 0, 1.0), Sample(X, 1, -1, 2.0)]),
    ],
)
def test_distances_and_normalization(function, samples):
    check_rule(function, samples, most=12, allow_missing=True)


@pytest.mark.parametrize("function", [torch.var, torch.std, torch.linalg.vector_norm, torch.norm])
def test_autocast_gives_the_dtype_of_plain_torch(function):
    x = X.detach().bfloat16()

    def run() -> None:
        mesh = init_device_mesh("cpu", (2,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, want = function(distributed(x, Layout(mesh, (5, 4), {0: (0,)}))), function(x)
        torch.testing.assert_close(got.full_tensor(), want)

    simulate(run, 2)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("function", [torch.var, torch.std, torch.var_mean, torch.std_mean])
@pytest.mark.parametrize("correction", [3, 4, 5, 9])
@pytest.mark.parametrize("ranks", [2, 6])
def test_gradients_of_statistics_without_degrees_of_freedom(function, correction, ranks):
    """They are infinite, as in one process, and not the NaN of a difference of infinities."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def both(x):
        made = function(x, 0, correction=correction)
        made = made[0] if isinstance(made, tuple) else made
        return made.detach(), torch.autograd.grad(made.sum(), x)[0]

    expected = both(x.clone().requires_grad_())

    def run():
        mesh = init_device_mesh("cpu", (ranks,))
        layout = Layout(mesh, (4, 3), {0: (0,)})
        found = both(distributed(x.clone().requires_grad_(), layout))
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got.full_tensor(), want, equal_nan=True)

    simulate(run, ranks)
