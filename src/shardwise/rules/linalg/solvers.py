"""Systems of linear equations: right-hand sides are independent, so they are free like batch dims.

All solvers are linear in the right-hand sides, so pending sums flow through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.rules.helpers.local_tensors import crop, lower_with_padding, pad_empty_dims
from shardwise.rules.pattern import NOTHING, matrices
from shardwise.rules.registry import Function, composed, rule, with_synonyms
from shardwise.rules.spec import Out, Spec

Tensor = torch.Tensor


def _sides(letter: str, left: bool) -> str:
    """Return the dims of right-hand sides: columns for `A X = B`, rows for `X A = B`."""
    return f"{letter} C" if left else f"R {letter}"


# ---- with a given factorization


@rule("linalg.solve_triangular")
@with_synonyms
def solve_triangular(input: Tensor, B: Tensor, *, left: bool = True, **flags: bool) -> Spec:
    return matrices([input, B], f"n n, {_sides('n', left)} -> {_sides('n', left)}", linear=[(1,)])


@rule("cholesky_solve")
@with_synonyms
def cholesky_solve(input: Tensor, input2: Tensor, upper: bool = False) -> Spec:
    return matrices([input, input2], "n C, n n -> n C", linear=[(0,)])


@rule("lu_solve")
@with_synonyms
def lu_solve(input: Tensor, LU_data: Tensor, LU_pivots: Tensor) -> Spec:
    return matrices([input, LU_data, LU_pivots], "n C, n n, n -> n C", linear=[(0,)])


@rule("linalg.lu_solve")
def linalg_lu_solve(
    LU: Tensor, pivots: Tensor, B: Tensor, *, left: bool = True, adjoint: bool = False
) -> Spec:
    sides = _sides("n", left)
    return matrices([LU, pivots, B], f"n n, n, {sides} -> {sides}", linear=[(2,)])


@rule("linalg.ldl_solve")
def ldl_solve(LD: Tensor, pivots: Tensor, B: Tensor, *, hermitian: bool = False) -> Spec:
    return matrices([LD, pivots, B], "n n, n, n C -> n C", linear=[(2,)])


@rule("ormqr")
@with_synonyms
def ormqr(
    input: Tensor, input2: Tensor, input3: Tensor, left: bool = True, transpose: bool = False
) -> Spec:
    sides = _sides("n", left)
    return matrices(
        [input, input2, input3],
        f"n j, k, {sides} -> {sides}",
        linear=[(2,)],
        lower=lower_with_padding(torch.ormqr),
        positions=(),
    )


@composed("triangular_solve")
def triangular_solve(
    input: Tensor,
    A: Tensor,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> Any:
    """Solve by other functions, as the second result has a gradient but no right-hand sides."""
    batch = torch.broadcast_shapes(input.shape[:-2], A.shape[:-2])  # type: ignore[no-untyped-call]
    solution = torch.linalg.solve_triangular(
        A.mT if transpose else A, input, upper=upper != transpose, unitriangular=unitriangular
    )
    coefficients = A.expand(*batch, *A.shape[-2:]).clone()
    return torch.return_types.triangular_solve((solution, coefficients))


# ---- with matrices


def _solving(function: Any, results: str, **extra: Any) -> Callable[..., Spec]:
    """Return the rule of a solver; `results` is the pattern of what it returns beside the
    solution."""

    @with_synonyms
    def local(input: Tensor, B: Tensor, **flags: bool) -> Any:
        return function(input, B.unsqueeze(0), **flags)

    @with_synonyms
    def made(input: Tensor, B: Tensor, *, left: bool = True, **flags: bool) -> Spec:
        if B.dim() == 1 or B.shape == input.shape[:-1]:
            return matrices([input, B], f"n n, n -> n{results}", **extra)
        sides = _sides("n", left)
        # Shards of matrices with fewer batch dims might be mistaken for a batch of vectors.
        lower = (lambda context: local) if B.dim() == input.dim() - 1 else None
        pattern = f"n n, {sides} -> {sides}{results}"
        return matrices([input, B], pattern, lower=lower, positions=(), **extra)

    return made


rule("linalg.solve")(_solving(torch.linalg.solve, "", linear=[(1,)], may_fail=True))
rule("linalg.solve_ex")(_solving(torch.linalg.solve_ex, ", ."))


# ---- least squares


@composed("linalg.lstsq")
def lstsq(input: Tensor, b: Tensor, rcond: Any = None, *, driver: str | None = None) -> Any:
    driver = driver or ("gelsy" if input.device.type == "cpu" else "gels")
    solution, residuals, rank, values = _LEAST_SQUARES.dispatched(input, b, rcond, driver)
    # torch returns residuals only if all matrices have full rank, where it computes ranks.
    if residuals.numel() and rank.numel() and not bool((rank == input.shape[-1]).all()):
        residuals = residuals.new_empty((0,))
    return torch.return_types.linalg_lstsq((solution, residuals, rank, values))  # type: ignore[attr-defined]


def _least_squares(input: Tensor, b: Tensor, rcond: Any, driver: str) -> Any:
    batch = torch.broadcast_shapes(input.shape[:-2], b.shape[: input.dim() - 2])  # type: ignore[no-untyped-call]
    columns = b.shape[input.dim() - 1 :]
    # LAPACK may crash without columns, and torch drops the gradient for an empty batch. Matrices
    # without rows or unknowns are not padded: torch has a result, which zeros would change.
    one = (1,) * (input.dim() - 2)
    matrix, sides = pad_empty_dims(input, (*one, 0, 0)), pad_empty_dims(b, (*one, 0, 1))
    found = torch.linalg.lstsq(matrix, sides, rcond, driver=driver)
    solution = crop(found.solution, (*batch, input.shape[-1], *columns))
    residuals = found.residuals
    if _has_residuals(input, driver):
        shape = (*batch, *(columns or (1,)))
        if not residuals.numel():  # a matrix is rank-deficient, so the caller drops them
            residuals = residuals.sum().expand(shape)  # differentiable zeros
        residuals = crop(residuals, shape)
    rank, values = found.rank, found.singular_values
    if driver != "gels":
        rank = crop(rank, input.shape[:-2])
    if driver in ("gelss", "gelsd"):
        values = crop(values, (*input.shape[:-2], min(input.shape[-2:])))
    return solution, residuals, rank, values


def _has_residuals(input: Tensor, driver: str) -> bool:
    return input.shape[-2] > input.shape[-1] and driver != "gelsy"


_LEAST_SQUARES = Function("lstsq", _least_squares)


@rule(_LEAST_SQUARES)
def least_squares(input: Tensor, b: Tensor, rcond: Any, driver: str) -> Spec:
    sides, results = ("m", "n, 1") if b.dim() < input.dim() else ("m C", "n C, C")
    spec = matrices([input, b], f"m n, {sides} -> {results}")
    (_, dims), _ = spec.inputs
    solution, residuals = spec.outputs
    # Ranks have the batch dims of the matrices, which do not broadcast.
    rank = Out(dims[:-2], tuple(input.shape[:-2]))
    values = Out((*dims[:-2], None), (*input.shape[:-2], min(input.shape[-2:])))
    return Spec(
        spec.inputs,
        [
            solution,
            residuals if _has_residuals(input, driver) else NOTHING,
            NOTHING if driver == "gels" else rank,
            values if driver in ("gelss", "gelsd") else NOTHING,
        ],
        may_fail=True,
    )
