"""Linear algebra: each matrix is whole; batch dims may be split in any way.

A matrix that cannot be factored makes the call fail on all ranks (`Spec.may_fail`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.dtensor.composite import decompose
from shardwise.dtensor.state import plain_tensors
from shardwise.dtensor.tensor import DTensor, tensors_in
from shardwise.random.seed_check import check_plain_draws
from shardwise.rules.helpers.dims import as_dims, replace_dim, unsplit_spec
from shardwise.rules.helpers.local_tensors import lower_with_padding
from shardwise.rules.pattern import matrices
from shardwise.rules.pointwise.elementwise import broadcast_spec, tensors_among
from shardwise.rules.registry import functions_named, handler, input_of, rule, with_synonyms
from shardwise.rules.spec import Out, Spec, SplitContext, dims_of

Tensor = torch.Tensor

# ---- one batch of matrices

_PATTERNS = {
    "n n -> n n": "inverse cholesky cholesky_inverse matrix_exp matrix_power "
    "linalg.inv linalg.cholesky linalg.matrix_exp linalg.matrix_power linalg.matrix_sqrth",
    "n n -> n n, .": "linalg.inv_ex linalg.cholesky_ex",
    "n n -> .": "det logdet linalg.det",
    "n n -> ., .": "slogdet linalg.slogdet",
    "n n -> n, n n": "linalg.eig linalg.eigh",
    "n n -> n": "linalg.eigvals linalg.eigvalsh",
    "m n -> k": "linalg.svdvals",
    "m n -> n m": "pinverse",
    "m n -> m n, n n": "linalg.polar",
    "m n -> m n, k": "geqrf linalg.lu_factor linalg.ldl_factor",
    "m n -> m n, k, .": "_lu_with_info linalg.lu_factor_ex linalg.ldl_factor_ex",
}


_SINCE_2_14 = {"linalg.polar", "linalg.matrix_sqrth"}

_NEVER_FAIL = {
    *("matrix_exp", "linalg.matrix_exp", "det", "logdet", "linalg.det", "slogdet"),
    *("linalg.slogdet", "geqrf", "_lu_with_info", "linalg.inv_ex", "linalg.cholesky_ex"),
    *("linalg.lu_factor_ex", "linalg.ldl_factor_ex"),
}


def _rule(pattern: str, may_fail: bool) -> Any:
    def made(*args: Any, **kwargs: Any) -> Spec:
        return matrices(list(tensors_in((args, kwargs))), pattern, may_fail=may_fail)

    return made


for _pattern, _names in _PATTERNS.items():
    for _name in _names.split():
        if _name in _SINCE_2_14 and not functions_named(_name):
            continue
        rule(_name, inplace=False)(_rule(_pattern, _name not in _NEVER_FAIL))


@rule("linalg.cond")
@with_synonyms
def cond(input: Tensor, p: Any = None) -> Spec:
    return matrices(
        [input],
        "m n -> .",
        lower=lower_with_padding(torch.linalg.cond),
        positions=(),
        may_fail=True,
    )


@rule("orgqr", "linalg.householder_product")
@with_synonyms
def householder_product(input: Tensor, tau: Any = None, *, input2: Any = None) -> Spec:
    tau = input2 if tau is None else tau
    lower = lower_with_padding(torch.linalg.householder_product)
    return matrices([input, tau], "m n, k -> m n", lower=lower, positions=())


def _qr(input: Tensor, mode: str) -> Spec:
    patterns = {"reduced": "m k, k n", "complete": "m m, m n", "r": "0, k n"}
    if mode not in patterns:
        raise RuntimeError(f"qr received unrecognized mode '{mode}'")
    return matrices([input], f"m n -> {patterns[mode]}")


@rule("qr")
@with_synonyms
def qr(input: Tensor, some: bool = True) -> Spec:
    return _qr(input, "reduced" if some else "complete")


@rule("linalg.qr")
@with_synonyms
def linalg_qr(input: Tensor, mode: str = "reduced") -> Spec:
    return _qr(input, mode)


@rule("svd")
@with_synonyms
def svd(input: Tensor, some: bool = True, compute_uv: bool = True) -> Spec:
    results = "m k, k, n k" if some and compute_uv else "m m, k, n n"
    return matrices([input], f"m n -> {results}", may_fail=True)


@rule("linalg.svd")
@with_synonyms
def linalg_svd(input: Tensor, full_matrices: bool = True, *, driver: Any = None) -> Spec:
    results = "m m, k, n n" if full_matrices else "m k, k, k n"
    return matrices([input], f"m n -> {results}", may_fail=True)


@rule(torch.functional.lu)
@with_synonyms
def lu(input: Tensor, pivot: bool = True, get_infos: bool = False) -> Spec:
    results = f"m n, k{', .' if get_infos else ''}"
    return matrices([input], f"m n -> {results}", needs_plain=True, may_fail=not get_infos)


@rule("linalg.lu")
@with_synonyms
def linalg_lu(input: Tensor, *, pivot: bool = True) -> Spec:
    return matrices([input], f"m n -> {'m m' if pivot else '0'}, m k, k n")


@rule("lu_unpack")
def lu_unpack(
    LU_data: Tensor, LU_pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True
) -> Spec:
    permutation = "m m" if unpack_pivots else "0"
    triangles = "m k, k n" if unpack_data else "0, 0"
    return matrices([LU_data, LU_pivots], f"m n, k -> {permutation}, {triangles}")


# ---- with tolerances, which broadcast against the batch


def _tolerant(function: Any, input: Tensor, tolerances: Sequence[Any], result: str) -> Spec:
    given = tensors_among(*tolerances)
    pattern = f"m n{', .' * len(given)} -> {result}"
    lower = lower_with_padding(function)
    return matrices([input, *given], pattern, lower=lower, positions=(), may_fail=True)


@rule("linalg.pinv")
@with_synonyms
def pinv(
    input: Tensor, rcond: Any = None, hermitian: bool = False, *, atol: Any = None, rtol: Any = None
) -> Spec:
    return _tolerant(torch.linalg.pinv, input, (rcond, atol, rtol), "n m")


@rule("linalg.matrix_rank")
@with_synonyms
def matrix_rank(
    input: Tensor, tol: Any = None, hermitian: bool = False, *, atol: Any = None, rtol: Any = None
) -> Spec:
    return _tolerant(torch.linalg.matrix_rank, input, (tol, atol, rtol), ".")


# ---- all dims together form one matrix


@rule("linalg.tensorinv")
@with_synonyms
def tensorinv(input: Tensor, ind: int = 2) -> Spec:
    return unsplit_spec([input], (*input.shape[ind:], *input.shape[:ind]))


@rule("linalg.tensorsolve")
@with_synonyms
def tensorsolve(input: Tensor, other: Tensor, dims: Any = None) -> Spec:
    last = [each % input.dim() for each in dims or ()]
    kept = [size for dim, size in enumerate(input.shape) if dim not in last]
    shape = (*kept, *(input.shape[dim] for dim in last))[other.dim() :]
    return unsplit_spec([input, other], shape)


# ---- low-rank approximations


@handler(torch.svd_lowrank, torch.pca_lowrank)
def low_rank(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run torch's Python code; the random matrix that it draws is the same on every rank."""
    given = next(each for each in tensors_in((args, kwargs)) if isinstance(each, DTensor))
    check_plain_draws(given._layout.mesh)
    run = decompose(function)
    assert run is not None, "it is written in Python"
    with plain_tensors("assume"):
        return run(*args, **kwargs)


# ---- vectors


@rule("cross")
@with_synonyms
def cross(input: Tensor, other: Tensor, dim: int | None = None) -> Spec:
    if dim is not None:
        return _cross(input, other, dim)
    first = next((at for at, size in enumerate(input.shape) if size == 3), -1)

    @with_synonyms
    def run(input: Tensor, other: Tensor, dim: int | None = None) -> Any:
        return torch.linalg.cross(
            input, other, dim=first
        )  # the default dim depends on sizes, and a shard has others

    return _cross(input, other, first, lower=lambda context: run, positions=())


@rule("linalg.cross")
@with_synonyms
def linalg_cross(input: Tensor, other: Tensor, *, dim: int = -1) -> Spec:
    return _cross(input, other, dim)


def _cross(input: Tensor, other: Tensor, dim: int, **extra: Any) -> Spec:
    """Return the spec of a cross product: its dim is whole, the others broadcast."""
    spec = broadcast_spec([input, other])
    (out,) = spec.outputs
    (along,) = as_dims(dim, len(out.shape)) or (0,)
    inputs = [(tensor, replace_dim(dims, along, None)) for tensor, dims in spec.inputs]
    outputs = [Out(replace_dim(out.dims, along, None), out.shape)]
    return Spec(inputs, outputs, linear=[(0,), (1,)], **extra)


def _powers(input: Tensor, count: int, run: Any) -> Spec:
    """Return the spec of a table of powers; their number depends on the whole vector."""
    out = Out((*dims_of(input), None), (*input.shape, count))

    def lower(context: SplitContext) -> Any:
        return lower_with_padding(run)(context) or run

    return Spec([(input, dims_of(input))], [out], lower=lower, positions=())


@rule("vander")
@with_synonyms
def vander(input: Tensor, N: int | None = None, increasing: bool = False) -> Spec:
    count = input.shape[0] if N is None else N

    def run(*args: Any, **kwargs: Any) -> Tensor:
        return torch.vander(input_of(args, kwargs), count, increasing)

    return _powers(input, count, run)


@rule("linalg.vander")
@with_synonyms
def linalg_vander(input: Tensor, *, N: int | None = None) -> Spec:
    if input.dim() == 0:
        return unsplit_spec([input], (1, 1 if N is None else N))
    count = input.shape[-1] if N is None else N

    def run(*args: Any, **kwargs: Any) -> Any:
        return torch.linalg.vander(input_of(args, kwargs), N=count)

    return _powers(input, count, run)
