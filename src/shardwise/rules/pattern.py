"""Patterns: one notation for the factors of a call, like an einsum: "... m k, ... k n -> ... m n".

| part of a pattern | meaning                                                                    |
|-------------------|----------------------------------------------------------------------------|
| `m`               | a factor: all dims with this name have one size, and are split together    |
| `...`             | any number of dims, counted from the last; in products they broadcast      |
| `a...`            | the same with a name of its own: these dims have equal sizes               |
| `_`               | a dim that must be whole                                                   |

`contraction` makes the spec of a product from a pattern, `matrices` that of an operator on batches
of matrices, and `registry.register_rule` that of a user's operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise.rules.helpers.dims import Inputs, broadcast_dims
from shardwise.rules.spec import Dims, Out, Spec

Names = Sequence[str]


class PatternError(RuntimeError):
    """Tensors that do not fit a pattern."""


def parse_pattern(pattern: str, ndims: Sequence[int]) -> tuple[list[Names], list[Names]]:
    """Return the name of each dim of the inputs, which have `ndims` dims, and of the results."""
    left, _, right = pattern.partition("->")
    inputs = [part.split() for part in left.split(",")]
    if len(inputs) != len(ndims):
        raise PatternError(f"expected {len(inputs)} tensors, got {len(ndims)}")
    most: dict[str, int] = {}
    counts = []
    for at, (names, ndim) in enumerate(zip(inputs, ndims, strict=True)):
        dots = [name for name in names if name.endswith("...")]
        counts.append(ndim - len(names) + len(dots))
        if counts[-1] < 0 or (counts[-1] and not dots):
            raise PatternError(f"it does not fit the {ndim} dims of tensor {at}")
        for name in dots:
            most[name] = max(most.get(name, 0), counts[-1])
    own = [dict.fromkeys(most, count) for count in counts]
    return (
        [list(_expand(names, count)) for names, count in zip(inputs, own, strict=True)],
        [list(_expand(part.split(), most)) for part in right.split(",")],
    )


def _expand(names: Names, counts: Mapping[str, int]) -> Iterator[str]:
    for name in names:
        if name.endswith("..."):
            yield from (f"{name}{at}" for at in range(counts.get(name, 0), 0, -1))
        else:
            yield name


def sizes_of(
    tensors: Sequence[torch.Tensor],
    names: Sequence[Names],
    may_broadcast: Callable[[str], bool] = lambda name: name.startswith("..."),
) -> dict[str, int]:
    """Return the size of each factor, after checking that all its dims have that size, or 1 if it
    may broadcast."""
    sizes: dict[str, int] = {}
    for tensor, given in zip(tensors, names, strict=True):
        for name, size in zip(given, tensor.shape, strict=True):
            known = size if name == "_" else sizes.setdefault(name, size)
            if known == size:
                continue
            if not may_broadcast(name) or 1 not in (known, size):
                raise PatternError(f"{name} is both {known} and {size}")
            sizes[name] = size if known == 1 else known
    return sizes


def factors_of(tensor: torch.Tensor, names: Names, sizes: Mapping[str, int]) -> Dims:
    """Return the factors of a tensor; None for a dim that is whole, broadcasts or repeats a
    name."""
    return tuple(
        name if name != "_" and size == sizes[name] and name not in names[:at] else None
        for at, (name, size) in enumerate(zip(names, tensor.shape, strict=True))
    )


# ---- products of tensors


def contraction(
    pattern: str,
    *operands: torch.Tensor,
    first: torch.Tensor | None = None,
    last: torch.Tensor | None = None,
    broadcasts: bool = False,
    **extra: Any,
) -> Spec:
    """Return the spec of a product of tensors; factors that the result does not have are summed.

    Arguments:
        operands: the tensors that are multiplied, in the order of the call.
        first: the first argument of the call, if it is added to the product; it broadcasts.
        last: the last argument of the call, if it is added to the product; it broadcasts.
        broadcasts: whether every dim of size 1 broadcasts, not only those of `...`.
    """
    names, (output,) = parse_pattern(pattern, [each.dim() for each in operands])
    sizes = sizes_of(operands, names, lambda name: broadcasts or name.startswith("..."))
    inputs: Inputs = [
        (tensor, factors_of(tensor, given, sizes))
        for tensor, given in zip(operands, names, strict=True)
    ]
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


def expanded_dims(added: torch.Tensor, output: Names, shape: tuple[int, ...]) -> Dims:
    """Return the factors of a tensor that broadcasts against a result with this shape and
    factors."""
    skipped = len(shape) - added.dim()
    ends = zip(added.shape, shape[max(skipped, 0) :], strict=False)
    if skipped < 0 or any(size not in (1, wanted) for size, wanted in ends):
        raise PatternError(f"expected one that expands to {shape}, got {tuple(added.shape)}")
    return broadcast_dims(added, output, shape)


# ---- batches of matrices

NOTHING = Out((None,), (0,))
"""The empty tensor that torch returns for a result that was not requested."""


def matrices(tensors: Sequence[torch.Tensor], pattern: str, **extra: Any) -> Spec:
    """Return the spec of an operator on batches of matrices and vectors.

    The pattern names the last dims of each operand and result; the batch dims before them broadcast
    and are free. A dim with a small letter must be whole, a dim with a capital is free. `k` is the
    smaller of `m` and `n` if no operand has it. `.` stands for batch dims only, `0` for an empty
    tensor without batch dims.

    Example:
        >>> matrices([A], "m n -> m k, k, k n")  # singular values and vectors
    """
    with_batch = "->".join(
        ",".join(f"... {part.replace('.', '')}" for part in side.split(","))
        for side in pattern.split("->")
    )
    names, results = parse_pattern(with_batch, [each.dim() for each in tensors])
    sizes = sizes_of(tensors, names) | {"1": 1}
    if "m" in sizes and "n" in sizes:
        sizes.setdefault("k", min(sizes["m"], sizes["n"]))
    inputs = [
        (tensor, _free(factors_of(tensor, given, sizes)))
        for tensor, given in zip(tensors, names, strict=True)
    ]
    outputs = [
        NOTHING if "0" in each else Out(_free(each), tuple(sizes[name] for name in each))
        for each in results
    ]
    return Spec(inputs, outputs, **extra)


def _free(names: Sequence[str | None]) -> Dims:
    """Return the factors without those of dims that are whole."""
    return tuple(
        name if name and (name.isupper() or name.startswith("...")) else None for name in names
    )
