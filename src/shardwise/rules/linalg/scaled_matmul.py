"""Products of float8 matrices with scales.

Rows and columns are free. The contracted dim may be split if the dtype of the result can be summed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.core.mesh import DeviceMesh
from shardwise.rules.helpers.dims import Inputs, unsplit
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
    for scales, by_row in ((first_scales, ("m", None)), (second_scales, (None, "n"))):
        for scale in scales:
            is_one = scale.numel() == 1
            if not is_one and scale.shape not in ((rows, 1), (1, columns)):  # scales of blocks
                every = [first, second, *first_scales, *second_scales, *added]
                return unsplit(every, shape, lower=lower)
            inputs.append((scale, (None,) * scale.dim() if is_one else by_row))
    for each in added:
        dims: Dims = ("n",) if tuple(each.shape) == (columns,) else (None,) * each.dim()
        inputs.append((each, dims))

    def allows(splits: Mapping[str, tuple[int, ...]], mesh: DeviceMesh) -> bool:
        return all(
            _divides(size, [mesh.shape[axis] for axis in splits.get(name, ())])
            for name, size in (("n", columns), ("k", inner))
        )

    is_summed = not added and dtype is not None and dtype.itemsize > 1
    reduces = {"k": "sum"} if is_summed else {}
    return Spec(inputs, [Out(("m", "n"), shape)], reduces=reduces, allows=allows, lower=lower)


def _divides(size: int, counts: Sequence[int]) -> bool:
    """Return whether all chunks of a dim consist of whole units."""
    for count in counts:
        if size % (count * _UNIT):
            return False
        size //= count
    return True
