"""Products of matrices and vectors: einsums, each linear in every operand.

A factor that the result does not have is summed: if it is split, the result is pending a sum. A
tensor that is added to the product (a bias) is then pending too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shardwise.rules.helpers.dims import Inputs, broadcast_dims
from shardwise.rules.registry import rule
from shardwise.rules.spec import Dims, Out, Spec, SplitContext
from shardwise.torch_internals import variable_functions

Tensor = torch.Tensor
Names = Sequence[str]

VF: Any = variable_functions
"""The C functions that torch's Python functions call."""


# ---- the general form


def contraction(
    operands: Sequence[tuple[Tensor, Names]],
    output: Names,
    *,
    first: Tensor | None = None,
    last: Tensor | None = None,
    broadcasts: bool = False,
    **extra: Any,
) -> Spec:
    """Return the spec of a product of tensors, from the factors of its operands and result.

    Arguments:
        operands: the tensors that are multiplied, in the order of the call.
        output: the factors of the result; all other factors are summed.
        first: the first argument of the call, if it is added to the product; it broadcasts.
        last: the last argument of the call, if it is added to the product; it broadcasts.
        broadcasts: whether a dim of size 1 broadcasts; dims whose name starts with `...` always do.
    """
    sizes = _sizes(operands, broadcasts)
    inputs: Inputs = [(tensor, _dims(tensor, names, sizes)) for tensor, names in operands]
    shape = tuple(sizes[name] for name in output)
    linear: list[tuple[int, ...]] = [(at,) for at in range(len(inputs))]
    if first is not None:
        inputs.insert(0, (first, expanded_dims(first, output, shape)))
        linear = [(0, at) for at in range(1, len(inputs))]
        extra["additive"] = (0,)
    if last is not None:
        linear = [(at, len(inputs)) for at in range(len(inputs))]
        extra["additive"] = (len(inputs),)
        inputs.append((last, expanded_dims(last, output, shape)))
    summed = {name: "sum" for name in sizes if name not in output}
    return Spec(inputs, [Out(tuple(output), shape)], reduces=summed, linear=linear, **extra)


def _sizes(operands: Sequence[tuple[Tensor, Names]], broadcasts: bool) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for tensor, names in operands:
        if len(names) != tensor.dim():
            raise RuntimeError(f"expected {len(names)} dims, got shape {tuple(tensor.shape)}")
        for name, size in zip(names, tensor.shape, strict=True):
            known = sizes.setdefault(name, size)
            if known == size:
                continue
            if not (broadcasts or name.startswith("...")) or 1 not in (known, size):
                raise RuntimeError(f"expected dims of one size, got {known} and {size}")
            sizes[name] = size if known == 1 else known
    return sizes


def _dims(tensor: Tensor, names: Names, sizes: Mapping[str, int]) -> Dims:
    """Return the factors of a tensor; None for a dim that broadcasts or repeats a name."""
    return tuple(
        name if size == sizes[name] and name not in names[:at] else None
        for at, (name, size) in enumerate(zip(names, tensor.shape, strict=True))
    )


def expanded_dims(added: Tensor, output: Names, shape: tuple[int, ...]) -> Dims:
    """Return the factors of a tensor that broadcasts against a result with this shape and
    factors."""
    skipped = len(shape) - added.dim()
    if skipped < 0:
        raise RuntimeError(f"expected a tensor that expands to {shape}, got {tuple(added.shape)}")
    for size, wanted in zip(added.shape, shape[skipped:], strict=True):
        if size not in (1, wanted):
            raise RuntimeError(f"expected one that expands to {shape}, got {tuple(added.shape)}")
    return broadcast_dims(added, output, shape)


def leading(count: int) -> list[str]:
    """Return the factors of `count` batch dims, which broadcast; they are counted from the last."""
    return [f"...{at}" for at in range(count, 0, -1)]


def are_tensors(*values: Any) -> bool:
    """Return whether all are tensors; a deprecated form of torch's functions starts with
    numbers."""
    return all(isinstance(value, Tensor) for value in values)


# ---- two operands


@rule("mm")
def mm(input: Tensor, mat2: Tensor, out_dtype: Any = None) -> Spec:
    return contraction([(input, "mk"), (mat2, "kn")], "mn")


@rule("bmm")
def bmm(input: Tensor, mat2: Tensor, out_dtype: Any = None) -> Spec:
    return contraction([(input, "bmk"), (mat2, "bkn")], "bmn")


@rule("mv")
def mv(input: Tensor, vec: Tensor) -> Spec:
    return contraction([(input, "mk"), (vec, "k")], "m")


@rule("dot")
def dot(input: Tensor, tensor: Tensor) -> Spec:
    return contraction([(input, "k"), (tensor, "k")], "")


@rule("vdot")
def vdot(input: Tensor, other: Tensor) -> Spec:
    return contraction([(input, "k"), (other, "k")], "")


@rule("outer", "ger")
def outer(input: Tensor, vec2: Tensor) -> Spec:
    return contraction([(input, "m"), (vec2, "n")], "mn")


@rule("matmul", "linalg.matmul", torch.Tensor.__matmul__)
def matmul(input: Tensor, other: Tensor) -> Spec:
    batch = leading(max(input.dim(), other.dim()) - 2)
    # A vector has neither batch dims nor rows (or columns) of its own.
    rows = ["m"] if input.dim() > 1 else []
    columns = ["n"] if other.dim() > 1 else []
    left = [*_last(batch, input.dim() - 2), *rows, "k"]
    right = [*_last(batch, other.dim() - 2), "k", *columns]
    return contraction([(input, left), (other, right)], [*batch, *rows, *columns])


@rule(torch.Tensor.__rmatmul__)
def rmatmul(self: Tensor, other: Tensor) -> Spec | None:
    return matmul(other, self)


def _last(names: list[str], count: int) -> list[str]:
    return names[len(names) - count :] if count > 0 else []


@rule("inner")
def inner(input: Tensor, other: Tensor) -> Spec:
    summed = ["k"] if input.dim() and other.dim() else []
    left = [f"a{at}" for at in range(input.dim() - len(summed))]
    right = [f"b{at}" for at in range(other.dim() - len(summed))]
    return contraction([(input, left + summed), (other, right + summed)], left + right)


@rule("linalg.vecdot")
def vecdot(x: Tensor, y: Tensor, *, dim: int = -1) -> Spec:
    names = leading(max(x.dim(), y.dim()))
    summed = names[dim]  # the dim is counted after broadcasting
    operands = [(x, _last(names, x.dim())), (y, _last(names, y.dim()))]
    return contraction(operands, [name for name in names if name != summed])


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
    return contraction([(a, left), (b, right)], output)


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
    )


@rule("cdist", VF.cdist)
def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Spec:
    """Distances between rows: not linear; the features must be whole."""
    batch = leading(max(x1.dim(), x2.dim()) - 2)
    left = [*_last(batch, x1.dim() - 2), "m", "k"]
    right = [*_last(batch, x2.dim() - 2), "n", "k"]
    spec = contraction([(x1, left), (x2, right)], [*batch, "m", "n"])
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
    batch = leading(input.dim() - 1)
    columns = ["n"] if weight.dim() > 1 else []
    operands = [(input, [*batch, "k"]), (weight, [*columns, "k"])]
    return contraction(operands, [*batch, *columns], last=bias)


@rule("bilinear")
def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Spec:
    batch = [f"b{at}" for at in range(input1.dim() - 1)]
    operands = [(input1, [*batch, "i"]), (input2, [*batch, "j"]), (weight, "nij")]
    return contraction(
        operands,
        [*batch, "n"],
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
    return contraction(list(zip(tensors, names, strict=True)), output)


@rule("chain_matmul")
def chain_matmul(*matrices: Tensor, out: Any = None) -> Spec | None:
    return multi_dot(matrices, out)


# ---- beta * input + alpha * product


@rule("addmm", ignores_numbers=True)
def addmm(input: Any, mat1: Tensor, mat2: Any = None, **numbers: Any) -> Spec | None:
    if not are_tensors(input, mat1, mat2):
        return None
    return contraction([(mat1, "mk"), (mat2, "kn")], "mn", first=input)


@rule("addmv", ignores_numbers=True)
def addmv(input: Any, mat: Tensor, vec: Any = None, **numbers: Any) -> Spec | None:
    if not are_tensors(input, mat, vec):
        return None
    return contraction([(mat, "mk"), (vec, "k")], "m", first=input)


@rule("addr", ignores_numbers=True)
def addr(input: Any, vec1: Tensor, vec2: Any = None, **numbers: Any) -> Spec | None:
    if not are_tensors(input, vec1, vec2):
        return None
    return contraction([(vec1, "m"), (vec2, "n")], "mn", first=input)


@rule("addbmm", ignores_numbers=True)
def addbmm(input: Any, batch1: Tensor, batch2: Any = None, **numbers: Any) -> Spec | None:
    if not are_tensors(input, batch1, batch2):
        return None
    return contraction([(batch1, "bmk"), (batch2, "bkn")], "mn", first=input)


@rule("baddbmm", ignores_numbers=True)
def baddbmm(input: Any, batch1: Tensor, batch2: Any = None, **numbers: Any) -> Spec | None:
    if not are_tensors(input, batch1, batch2):
        return None
    return contraction([(batch1, "bmk"), (batch2, "bkn")], "bmn", first=input)


# ---- einsum: its equation is the rule


@rule(torch.einsum)
def einsum(equation: str, *operands: Tensor) -> Spec:
    """Make the spec from the equation; torch translates lists of subscripts into one."""
    names, output = parsed_equation(equation, [operand.dim() for operand in operands])
    for operand, given in zip(operands, names, strict=True):
        if len(set(zip(given, operand.shape, strict=True))) != len(set(given)):
            raise RuntimeError(f"{equation}: a subscript is repeated with another size")
    return contraction(
        list(zip(operands, names, strict=True)),
        output,
        broadcasts=True,
        lower=lambda context: _lowered(context, names),
        positions={name for given in names for name, times in Counter(given).items() if times > 1},
    )


def parsed_equation(equation: str, ndims: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """Return the subscripts of each operand and of the result; each dim of `...` has its own
    name."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    if len(parts) != len(ndims):
        raise RuntimeError(f"{equation}: expected {len(parts)} operands, got {len(ndims)}")
    counts = [ndim - len(part.replace("...", "")) for part, ndim in zip(parts, ndims, strict=True)]
    for part, count in zip(parts, counts, strict=True):
        if count < 0 or (count and "..." not in part):
            raise RuntimeError(f"{equation}: {part!r} does not fit {count} dims more")
    most = max(
        (count for part, count in zip(parts, counts, strict=True) if "..." in part), default=0
    )
    names = [_expanded(part, count) for part, count in zip(parts, counts, strict=True)]
    if arrow:
        return names, _expanded(right, most)
    # Without "->" the result has the letters that occur once, capitals first.
    letters = Counter(left.replace("...", "").replace(",", ""))
    return names, leading(most) + sorted(name for name, times in letters.items() if times == 1)


def _expanded(part: str, count: int) -> list[str]:
    before, dots, after = part.partition("...")
    return [*before, *(leading(count) if dots else ()), *after]


def _lowered(context: SplitContext, names: Sequence[Sequence[str]]) -> Any:
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
    context: SplitContext, names: Sequence[Sequence[str]]
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
