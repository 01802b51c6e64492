"""Products of matrices and vectors: einsums, each linear in every operand.

A factor that the result does not have is summed: if it is split, the result is pending a sum. A
tensor that is added to the product (a bias) is then pending too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from shardwise.rules.pattern import Names, contraction, parse_pattern
from shardwise.rules.registry import rule
from shardwise.rules.spec import Out, Spec, SplitContext
from shardwise.torch_internals import variable_functions

Tensor = torch.Tensor

VF: Any = variable_functions
"""The C functions that torch's Python functions call."""


def are_tensors(*values: Any) -> bool:
    """Return whether all are tensors; a deprecated form of torch's functions starts with
    numbers."""
    return all(isinstance(value, Tensor) for value in values)


# ---- two operands


@rule("mm")
def mm(input: Tensor, mat2: Tensor, out_dtype: Any = None) -> Spec:
    return contraction("m k, k n -> m n", input, mat2)


@rule("bmm")
def bmm(input: Tensor, mat2: Tensor, out_dtype: Any = None) -> Spec:
    return contraction("b m k, b k n -> b m n", input, mat2)


@rule("mv")
def mv(input: Tensor, vec: Tensor) -> Spec:
    return contraction("m k, k -> m", input, vec)


@rule("dot")
def dot(input: Tensor, tensor: Tensor) -> Spec:
    return contraction("k, k ->", input, tensor)


@rule("vdot")
def vdot(input: Tensor, other: Tensor) -> Spec:
    return contraction("k, k ->", input, other)


@rule("outer", "ger")
def outer(input: Tensor, vec2: Tensor) -> Spec:
    return contraction("m, n -> m n", input, vec2)


@rule("matmul", "linalg.matmul", torch.Tensor.__matmul__)
def matmul(input: Tensor, other: Tensor) -> Spec:
    # A vector has neither batch dims nor rows (or columns) of its own.
    rows = "m" if input.dim() > 1 else ""
    columns = "n" if other.dim() > 1 else ""
    return contraction(f"... {rows} k, ... k {columns} -> ... {rows} {columns}", input, other)


@rule(torch.Tensor.__rmatmul__)
def rmatmul(self: Tensor, other: Tensor) -> Spec | None:
    return matmul(other, self)


@rule("inner")
def inner(input: Tensor, other: Tensor) -> Spec:
    summed = "k" if input.dim() and other.dim() else ""
    return contraction(f"a... {summed}, b... {summed} -> a... b...", input, other)


@rule("linalg.vecdot")
def vecdot(x: Tensor, y: Tensor, *, dim: int = -1) -> Spec:
    ndim = max(x.dim(), y.dim())
    kept = [f"...{at}" for at in range(ndim, 0, -1)]
    del kept[dim]  # the dim is counted after broadcasting
    return contraction(f"..., ... -> {' '.join(kept)}", x, y)


@rule("tensordot", VF.tensordot)
def tensordot(
    a: Tensor, b: Tensor, dims: Any = 2, dims_other: Any = None, out: Any = None
) -> Spec | None:
    if out is not None or isinstance(dims, Tensor):
        return None
    if dims_other is not None:
        ours, theirs = dims, dims_other
    elif isinstance(dims, int):
        ours, theirs = list(range(a.dim() - dims, a.dim())), list(range(dims))
    else:
        ours, theirs = dims
    left = [f"a{at}" for at in range(a.dim())]
    right = [f"b{at}" for at in range(b.dim())]
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        left[our] = right[their] = f"...{number}"  # one of the two may have size 1
    output = [name for name in left + right if not name.startswith("...")]
    return contraction(f"{' '.join(left)}, {' '.join(right)} -> {' '.join(output)}", a, b)


@rule("kron")
def kron(input: Tensor, other: Tensor) -> Spec:
    """Each dim of the result merges a dim of `input` (outer) with a dim of `other` (inner)."""
    ndim = max(input.dim(), other.dim())
    ours = (1,) * (ndim - input.dim()) + tuple(input.shape)
    theirs = (1,) * (ndim - other.dim()) + tuple(other.shape)
    # Splitting the inner factor splits the result only if the outer dim has size 1.
    output = [f"b{at}" if ours[at] == 1 else f"a{at}" for at in range(ndim)]
    left = tuple(f"a{at}" if f"a{at}" in output else None for at in range(ndim))
    right = tuple(f"b{at}" if f"b{at}" in output else None for at in range(ndim))

    shape = tuple(our * their for our, their in zip(ours, theirs, strict=True))

    return Spec(
        [(input, left[ndim - input.dim() :]), (other, right[ndim - other.dim() :])],
        [Out(tuple(output), shape)],
        linear=[(0,), (1,)],
        scales=True,
        lower=lambda context: _kron,
        positions=(),
    )


def _kron(input: Tensor, other: Tensor) -> Tensor:
    """Do as torch.kron, which fails for some strides: it takes a view of the product."""
    ndim = max(input.dim(), other.dim())
    outer, inner = ((1,) * (ndim - each.dim()) + tuple(each.shape) for each in (input, other))
    left = input.reshape([size for each in outer for size in (each, 1)])
    right = other.reshape([size for each in inner for size in (1, each)])
    return (left * right).reshape([a * b for a, b in zip(outer, inner, strict=True)])


@rule("cdist", VF.cdist)
def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Spec:
    """Distances between rows: not linear; the features must be whole."""
    spec = contraction("... m k, ... n k -> ... m n", x1, x2)
    if compute_mode in (None, "use_mm_for_euclid_dist_if_necessary"):
        # torch chooses by the number of rows; here by the global number.
        compute_mode = 1 if max(x1.shape[-2], x2.shape[-2]) > 25 else 2

    def lower(context: SplitContext) -> Any:
        return partial(_cdist, mode=compute_mode)

    reduces = spec.reduces if p in (0, 1) else {}
    return Spec(spec.inputs, spec.outputs, reduces=reduces, lower=lower, positions=())


def _cdist(
    x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None, *, mode: Any
) -> Tensor:
    if isinstance(mode, str):
        return torch.cdist(x1, x2, p, mode)
    return VF.cdist(x1, x2, p, mode)  # type: ignore[no-any-return]


@rule("pdist")
def pdist(input: Tensor, p: float = 2.0) -> Spec:
    """Distances between all pairs of rows, so the rows are whole."""
    rows = input.shape[0]
    out = Out((None,), (rows * (rows - 1) // 2,))
    return Spec([(input, (None, "k"))], [out], reduces={"k": "sum"} if p in (0, 1) else {})


# ---- more operands


@rule("linear")
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Spec:
    columns = "n" if weight.dim() > 1 else ""
    return contraction(f"... k, {columns} k -> ... {columns}", input, weight, last=bias)


@rule("bilinear")
def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Spec:
    return contraction(
        "b... i, b... j, n i j -> b... n",
        input1,
        input2,
        weight,
        last=bias,
        lower=lambda context: _bilinear if context.axes("i", "j") else None,
        positions=(),
    )


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.bilinear`, also for features of size 0.

    torch's own fails for them: it flattens the batch with a size of -1, which is then ambiguous.
    """
    batch = input1.shape[:-1]
    rows = batch.numel()
    result = torch._trilinear(
        input1.reshape(rows, input1.shape[-1]), weight, input2.reshape(rows, input2.shape[-1]),
        [1, 3], [0], [1, 2], [2, 3],
    ).reshape(*batch, weight.shape[0])  # fmt: skip
    return result if bias is None else result + bias


@rule("linalg.multi_dot")
def multi_dot(tensors: Sequence[Tensor], out: Any = None) -> Spec | None:
    if out is not None:
        return None
    names = [[f"k{at}", f"k{at + 1}"] for at in range(len(tensors))]
    if tensors[0].dim() == 1:
        names[0] = names[0][1:]
    if tensors[-1].dim() == 1:
        names[-1] = names[-1][:1]
    ends = ("k0", f"k{len(tensors)}")
    output = [name for name in (*names[0], *names[-1]) if name in ends]
    return contraction(f"{', '.join(map(' '.join, names))} -> {' '.join(output)}", *tensors)


@rule("chain_matmul")
def chain_matmul(*matrices: Tensor, out: Any = None) -> Spec | None:
    return multi_dot(matrices, out)


# ---- beta * input + alpha * product


@rule("addmm", ignores_numbers=True)
def addmm(input: Any, mat1: Tensor, mat2: Any = None, **numbers: Any) -> Spec | None:
    if not are_tensors(input, mat1, mat2):
        return None
    return contraction("m k, k n -> m n", mat1, mat2, first=input)


@rule("addmv", ignores_numbers=True)
def addmv(input: Any, mat: Tensor, vec: Any = None, **numbers: Any) -> Spec | None:
    if not are_tensors(input, mat, vec):
        return None
    return contraction(
        "m k, k -> m", mat, vec, first=input, lower=_expand_for_no_matrix, positions=()
    )


def _expand_for_no_matrix(context: SplitContext) -> Any:
    """Return the lowering of `addmv` for an empty matrix: torch does not expand the input then."""
    (rows,) = context.outputs[0].local_shape()
    if rows and 0 not in context.inputs[1].local_shape():
        return None
    return lambda input, *args, **kwargs: torch.addmv(input.expand(rows), *args, **kwargs)


@rule("addr", ignores_numbers=True)
def addr(input: Any, vec1: Tensor, vec2: Any = None, **numbers: Any) -> Spec | None:
    if not are_tensors(input, vec1, vec2):
        return None
    return contraction("m, n -> m n", vec1, vec2, first=input)


@rule("addbmm", ignores_numbers=True)
def addbmm(input: Any, batch1: Tensor, batch2: Any = None, **numbers: Any) -> Spec | None:
    if not are_tensors(input, batch1, batch2):
        return None
    return contraction("b m k, b k n -> m n", batch1, batch2, first=input)


@rule("baddbmm", ignores_numbers=True)
def baddbmm(input: Any, batch1: Tensor, batch2: Any = None, **numbers: Any) -> Spec | None:
    if not are_tensors(input, batch1, batch2):
        return None
    return contraction("b m k, b k n -> b m n", batch1, batch2, first=input)


# ---- einsum: its equation is the rule


@rule(torch.einsum)
def einsum(equation: str, *operands: Tensor) -> Spec:
    """Make the spec from the equation; torch translates lists of subscripts into one."""
    pattern = _as_pattern(equation)
    names, _ = parse_pattern(pattern, [each.dim() for each in operands])
    for operand, given in zip(operands, names, strict=True):
        if len(set(zip(given, operand.shape, strict=True))) != len(set(given)):
            raise RuntimeError(f"{equation}: a subscript is repeated with another size")
    return contraction(
        pattern,
        *operands,
        broadcasts=True,
        lower=lambda context: _lowered(context, names),
        positions={name for given in names for name, times in Counter(given).items() if times > 1},
    )


def _as_pattern(equation: str) -> str:
    """Return an equation such as "...ij,jk" as a pattern with a result."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:  # the result has the letters that occur once, capitals first
        letters = Counter(left.replace("...", "").replace(",", ""))
        once = sorted(name for name, times in letters.items() if times == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    return _SUBSCRIPT.sub(r" \g<0>", f"{left}->{right}")


_SUBSCRIPT = re.compile(r"\.\.\.|[a-zA-Z]")


def _lowered(context: SplitContext, names: Sequence[Names]) -> Any:
    """Return the function that runs on the local tensors."""
    cuts = list(_diagonal_cuts(context, names))
    # torch's Python code only chooses the order of products; two operands have one order.
    run = torch.einsum if len(names) > 2 else _einsum
    if not cuts:
        return run

    def on_diagonals(equation: str, *operands: Tensor) -> Tensor:
        pieces = list(operands)
        for operand, dim, start, length in cuts:
            pieces[operand] = pieces[operand].narrow(dim, start, length)
        return run(equation, *pieces)

    return on_diagonals


def _einsum(equation: str, *operands: Tensor) -> Tensor:
    return VF.einsum(equation, operands)  # type: ignore[no-any-return]


def _diagonal_cuts(
    context: SplitContext, names: Sequence[Names]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield how to narrow repeated dims, as (operand, dim, start, length).

    Of a repeated subscript such as `ii` only the first dim is split; the others are narrowed to the
    same range.
    """
    for operand, given in enumerate(names):
        for dim, name in enumerate(given):
            first = given.index(name)
            if first != dim and context.inputs[operand].shard_order[first]:
                start, stop = context.inputs[operand].range(first)
                yield operand, dim, start, stop - start
