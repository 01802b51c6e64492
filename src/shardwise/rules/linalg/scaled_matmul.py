"""Products of float8 matrices with scales.

Rows and columns are free. The contracted dim may be split if the dtype of the result can be summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shardwise.core.mesh import DeviceMesh
from shardwise.rules.helpers.dims import Inputs, unsplit_spec
from shardwise.rules.pointwise.elementwise import tensors_among
from shardwise.rules.registry import rule
from shardwise.rules.spec import Dims, Out, Spec, SplitContext

Tensor = torch.Tensor


_UNIT = 16
"""torch's kernels need columns and contracted dims that are a multiple of this."""


@rule("_scaled_mm", inplace=False)
def scaled_mm(
    input: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Spec:
    added = tensors_among(bias, scale_result)
    return _spec(torch._scaled_mm, input, mat2, [scale_a], [scale_b], added, out_dtype)


@rule("_scaled_mm_v2", inplace=False)
def scaled_mm_v2(
    input: Tensor,
    mat2: Tensor,
    scale_a: Sequence[Tensor],
    recipe_a: Sequence[Any],
    swizzle_a: Sequence[Any],
    scale_b: Sequence[Tensor],
    recipe_b: Sequence[Any],
    swizzle_b: Sequence[Any],
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *rest: Any,
) -> Spec:
    added = tensors_among(bias)
    return _spec(torch._scaled_mm_v2, input, mat2, scale_a, scale_b, added, out_dtype)


def _spec(
    operator: Callable[..., Tensor],
    first: Tensor,
    second: Tensor,
    first_scales: Sequence[Tensor],
    second_scales: Sequence[Tensor],
    added: Sequence[Tensor],
    dtype: torch.dtype | None,
) -> Spec:
    (rows, inner), columns = first.shape, second.shape[1]
    shape = (rows, columns)

    def lower(context: SplitContext) -> Callable[..., Tensor]:
        # GPU kernels need row-major times column-major, and a redistribution may change strides.
        return lambda first, mat2, *args, **kwargs: operator(
            first.contiguous(), mat2.t().contiguous().t(), *args, **kwargs
        )

    inputs: Inputs = [(first, ("m", "k")), (second, ("k", "n"))]
    is_summed = not added and dtype is not None and dtype.itemsize > 1
    blocks = 0
    if operator is torch._scaled_mm:  # the second version takes lists of scales
        blocks = _blocks(first, second, first_scales, second_scales)
    if is_summed and blocks:
        inputs += [(first_scales[0], ("m", "k")), (second_scales[0], ("k", "n"))]
        return Spec(
            inputs,
            [Out(("m", "n"), shape)],
            reduces={"k": "sum"},
            allows=lambda splits, mesh: (
                _fit(splits, mesh, columns, inner)
                and blocks % math.prod(mesh.shape[axis] for axis in splits.get("k", ())) == 0
            ),
            lower=lambda context: partial(_by_blocks, operator),
            scales=True,
        )
    for scales, by_row in ((first_scales, ("m", None)), (second_scales, (None, "n"))):
        for scale in scales:
            is_one = scale.numel() == 1
            if not is_one and scale.shape not in ((rows, 1), (1, columns)):  # scales of blocks
                every = [first, second, *first_scales, *second_scales, *added]
                return unsplit_spec(every, shape, lower=lower)
            inputs.append((scale, (None,) * scale.dim() if is_one else by_row))
    for each in added:
        dims: Dims = ("n",) if tuple(each.shape) == (columns,) else (None,) * each.dim()
        inputs.append((each, dims))

    return Spec(
        inputs,
        [Out(("m", "n"), shape)],
        reduces={"k": "sum"} if is_summed else {},
        allows=lambda splits, mesh: _fit(splits, mesh, columns, inner),
        lower=lower,
    )


def _blocks(
    first: Tensor, second: Tensor, first_scales: Sequence[Tensor], second_scales: Sequence[Tensor]
) -> int:
    """Return the number of blocks of the contracted dim, if each has a scale for every row of the
    first matrix and for every column of the second; else 0.

    Ranks that split the contracted dim and scale their own parts have one block each.
    """
    if len(first_scales) != 1 or len(second_scales) != 1:
        return 0
    (rows, inner), columns = first.shape, second.shape[1]
    count = first_scales[0].shape[-1] if first_scales[0].dim() == 2 else 0
    given = tuple(first_scales[0].shape), tuple(second_scales[0].shape)
    fits = count > 1 and inner % (count * _UNIT) == 0 and given == ((rows, count), (count, columns))
    return count if fits else 0


def _by_blocks(
    operator: Callable[..., Tensor],
    first: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Multiply block by block, and add the products: torch takes one block of the contracted
    dim."""
    count = scale_a.shape[1]
    parts = [
        operator(
            left.contiguous(),
            right.t().contiguous().t(),
            rows.contiguous(),
            columns.contiguous(),
            *args,
            **kwargs,
        )
        for left, right, rows, columns in zip(
            first.chunk(count, 1),
            mat2.chunk(count, 0),
            scale_a.tensor_split(count, 1),
            scale_b.tensor_split(count, 0),
            strict=True,
        )
    ]
    return (
        parts[0]
        if count == 1
        else torch.stack(parts).sum(0, dtype=torch.float32).to(parts[0].dtype)
    )


def _fit(splits: Mapping[str, tuple[int, ...]], mesh: DeviceMesh, columns: int, inner: int) -> bool:
    """Return whether all chunks of columns and of the contracted dim consist of whole units."""
    return all(
        _divides(size, [mesh.shape[axis] for axis in splits.get(name, ())])
        for name, size in (("n", columns), ("k", inner))
    )


def _divides(size: int, counts: Sequence[int]) -> bool:
    """Return whether all chunks of a dim consist of whole units."""
    for count in counts:
        if size % (count * _UNIT):
            return False
        size //= count
    return True
