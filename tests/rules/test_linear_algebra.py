"""Linear algebra: batches and right-hand sides are split, and nothing is sent for that."""

from __future__ import annotations

import functools

import pytest
import torch
from support.rules import heard, in_layout, leaf, ranks, values

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.testing import Sample, check_rule

# check_rule finds splits that are legal, and complains of those that communicate.
check = functools.partial(check_rule, mesh_shapes=((3,),), most=4)

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning")
"""Of torch, of functions that have successors; they have rules all the same."""

MATRICES = leaf(4, 3, 3)
LOWER = (leaf(4, 3, 3).tril() + 3 * torch.eye(3)).detach().requires_grad_()
TALL = leaf(4, 5, 3)

BATCHES = {
    "inv_ex": (torch.linalg.inv_ex, [Sample(MATRICES)]),
    "svd": (torch.svd, [Sample(TALL)]),
    "linalg.qr": (torch.linalg.qr, [Sample(TALL.detach(), mode="r")]),
    "lu": (torch.Tensor.lu, [Sample(MATRICES)]),
    "cond": (torch.linalg.cond, [Sample(TALL), Sample(torch.ones(2, 0, 0))]),
    "householder_product": (torch.linalg.householder_product, [Sample(TALL, leaf(4, 3))]),
    "pinv": (torch.linalg.pinv, [Sample(TALL, atol=torch.rand(4), rtol=torch.rand(2, 1))]),
    "matrix_rank": (torch.linalg.matrix_rank, [Sample(torch.ones(4, 5, 3), tol=torch.rand(4))]),
    "cross": (torch.cross, [Sample(leaf(6, 3), leaf(6, 3))]),
    "linalg.cross": (torch.linalg.cross, [Sample(leaf(3, 1, 4), leaf(3, 2, 4), dim=0)]),
    "vander": (torch.vander, [Sample(torch.rand(5)), Sample(torch.rand(5), 3, increasing=True)]),
    "linalg.vander": (torch.linalg.vander, [Sample(leaf(2, 5)), Sample(leaf(), N=2)]),
}

if hasattr(torch.linalg, "polar"):  # torch 2.14
    _positive = (MATRICES @ MATRICES.mT).detach().requires_grad_()
    BATCHES["linalg.polar"] = (torch.linalg.polar, [Sample(TALL)])
    BATCHES["linalg.matrix_sqrth"] = (torch.linalg.matrix_sqrth, [Sample(_positive)])


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_split(name):
    function, samples = BATCHES[name]
    check(function, samples)


ROWS = leaf(4, 2, 3)
COLUMNS = leaf(4, 3, 2)
FACTORED = [each.detach() for each in torch.linalg.lu_factor(MATRICES)]

SYSTEMS = {
    "solve": (
        torch.linalg.solve,
        [Sample(MATRICES, COLUMNS), Sample(MATRICES, leaf(3)), Sample(MATRICES, leaf(4, 3))],
    ),
    "solve_triangular": (
        torch.linalg.solve_triangular,
        [Sample(LOWER, ROWS, upper=False, left=False)],
    ),
    "cholesky_solve": (torch.cholesky_solve, [Sample(COLUMNS, LOWER)]),
    "linalg.lu_solve": (torch.linalg.lu_solve, [Sample(*FACTORED, COLUMNS)]),
    "ldl_solve": (torch.linalg.ldl_solve, [Sample(*FACTORED, COLUMNS.detach())]),
    "ormqr": (torch.ormqr, [Sample(MATRICES, leaf(4, 3), COLUMNS)]),
    "lstsq": (
        torch.linalg.lstsq,
        [Sample(TALL, leaf(4, 5), driver="gels"),
         Sample(leaf(1, 5, 3), leaf(3, 5, 2), driver="gelss")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SYSTEMS)
def test_right_hand_sides_are_split_as_a_batch_is(name):
    function, samples = SYSTEMS[name]
    # Whether residuals are known is asked of all ranks.
    check(function, samples, allow_missing=name == "lstsq")


def test_the_second_result_of_triangular_solve_has_its_gradient_once():
    check(torch.triangular_solve, [Sample(leaf(3, 2), LOWER, upper=False)])


def test_pieces_of_matrices_are_not_taken_for_a_batch_of_vectors():
    """Three matrices and three columns of one right-hand side on each rank."""
    samples = [Sample(leaf(6, 3, 3), leaf(3, 3)), Sample(leaf(3, 3, 3), leaf(3, 6))]
    check_rule(torch.linalg.solve, samples, mesh_shapes=((2,),), most=8)


def test_a_pending_right_hand_side_stays_pending():
    def run(mesh):
        matrix = in_layout(values(3, 3), mesh, Replicate())
        side = in_layout(values(3, 2), mesh, Partial())
        events, result = heard(mesh, lambda: torch.linalg.solve(matrix, side))
        return [event.kind for event in events], result.placements, result.full_tensor()

    expected = torch.linalg.solve(values(3, 3), values(3, 2))
    for kinds, placements, result in ranks(run):
        assert (kinds, placements) == ([], (Partial(),))
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_residuals_are_missing_if_a_matrix_of_any_rank_lacks_rank(placement):
    def run(mesh):
        matrices = values(2, 5, 3, grad=False)
        matrices[1] = 1.0
        sides = in_layout(values(2, 5, 4), mesh, placement)
        found = torch.linalg.lstsq(in_layout(matrices, mesh, placement), sides, driver="gelsd")
        return tuple(found.residuals.shape), found.rank.tolist()

    assert ranks(run) == [((0,), [3, 1])] * 2


@pytest.mark.parametrize("driver", ["gels", "gelsy", "gelss", "gelsd"])
def test_least_squares_without_unknowns_or_equations(driver):
    no_unknowns = [Sample(leaf(2, 3, 0), leaf(2, 3, 2)), Sample(leaf(2, 3, 0), leaf(2, 3))]
    no_equations = [Sample(leaf(2, 0, 3), leaf(2, 0, 2)), Sample(leaf(3, 0, 0), leaf(3, 0, 2))]
    function = functools.partial(torch.linalg.lstsq, driver=driver)
    check(function, [*no_unknowns, *no_equations], allow_missing=True, most=9)


def test_a_matrix_that_must_be_whole_goes_to_another_dim_by_an_exchange():
    def run(mesh):
        batch = in_layout(values(2, 4, 4), mesh, Shard(1))
        events, result = heard(mesh, lambda: torch.linalg.inv(batch))
        return [(event.kind, event.bytes) for event in events], result.placements

    moved = ("all_to_all", 1 * 2 * 4 * 8)
    told = ("all_gather", 1)  # whether the other rank could invert its own
    assert ranks(run) == [([moved, told], (Shard(0),))] * 2


# ---- of low rank


def test_a_random_basis_is_the_same_on_every_rank_and_as_in_one_process():
    def run(mesh, placement):
        torch.manual_seed(3)
        with sw.plain_tensors("error"):
            parts = torch.svd_lowrank(in_layout(values(6, 5), mesh, placement), q=2)
            parts += torch.pca_lowrank(in_layout(values(4, 6), mesh, placement), q=2)
        return [each.full_tensor() for each in parts]

    torch.manual_seed(3)
    expected = [*torch.svd_lowrank(values(6, 5), q=2), *torch.pca_lowrank(values(4, 6), q=2)]
    for placement in (Shard(0), Shard(1), Partial()):
        for found in ranks(functools.partial(run, placement=placement)):
            torch.testing.assert_close(found, expected)


# ---- covariances


def test_covariances():
    weights = {
        "fweights": torch.tensor([1, 2, 1, 4]),
        "aweights": torch.rand(4, dtype=torch.float64),
    }
    check(torch.cov, [Sample(leaf(3, 4), correction=0, **weights)], allow_missing=True)
    check(torch.corrcoef, [Sample(leaf(3, 4, dtype=torch.complex128))], allow_missing=True)


def test_covariances_over_split_observations_send_means():
    def run(mesh):
        rows = in_layout(values(3, 8), mesh, Shard(1))
        events, result = heard(mesh, lambda: torch.cov(rows))
        return [(event.kind, event.shape) for event in events], result.placements

    assert ranks(run) == [([("all_reduce", (3, 1))], (Partial(),))] * 2


def test_cov_refuses_what_torch_refuses():
    def run(mesh):
        rows = in_layout(values(3, 4, grad=False), mesh, Shard(1))
        for weights, text in (
            ({"fweights": torch.ones(4)}, "integral dtype"),
            ({"aweights": torch.ones(3)}, "same numel"),
            ({"aweights": -torch.ones(4)}, "cannot be negative"),
            ({"aweights": torch.zeros(4)}, "sum to zero"),
        ):
            with pytest.raises(RuntimeError, match=text):
                torch.cov(rows, **weights)
        with pytest.warns(UserWarning, match="degrees of freedom"):
            return torch.cov(rows, correction=5).full_tensor()

    assert not any(found.isfinite().any() for found in ranks(run))


def test_no_correlation_is_beyond_one():
    def run(mesh):
        row = torch.randn(4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        rows = in_layout(torch.stack([row, 3 * row]), mesh, Replicate())
        return float(torch.corrcoef(rows).full_tensor().max())  # a bit more, but for a clamp

    assert ranks(run) == [1.0] * 2


def test_least_squares_on_ranks_without_a_matrix_have_a_way_for_gradients():
    matrices, sides = values(3, 4, 3), values(3, 4, 2)

    def run(mesh):
        found = torch.linalg.lstsq(
            in_layout(matrices, mesh, Shard(0)), in_layout(sides, mesh, Shard(0)), driver="gelsd"
        )
        return found.residuals.requires_grad, found.residuals.full_tensor().detach()

    expected = torch.linalg.lstsq(matrices, sides, driver="gelsd").residuals.detach()
    for requires_grad, residuals in ranks(run, 4):
        assert requires_grad
        torch.testing.assert_close(residuals, expected)
