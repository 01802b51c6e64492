"""Pooling to a given size.

If the size of the result divides the size of the input, all windows have one length and do not
overlap, so the dim may be split. Other spatial dims are whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.core.box import Range
from shardwise.rules.helpers.halo_exchange import per_dim, plan_exchange
from shardwise.rules.helpers.local_tensors import crop, is_empty, keeps_sums, pad_empty_dims
from shardwise.rules.nn.pooling import planes
from shardwise.rules.registry import Aten, rule
from shardwise.rules.spec import Dims, Out, Spec, SplitContext, dims_of
from shardwise.torch_internals import nn_builtins


def _sizes(input: torch.Tensor, space: int, output_size: Any) -> list[int]:
    """Return the spatial sizes of the result; None keeps the size of the input."""
    wanted = per_dim(output_size, space)
    given = input.shape[-space:]
    return [have if want is None else want for have, want in zip(given, wanted, strict=True)]


def _adaptive(
    input: torch.Tensor,
    space: int,
    sizes: list[int],
    operator: Callable[..., torch.Tensor],
    is_average: bool,
) -> Spec:
    names, shape = dims_of(input), tuple(input.shape)
    first = len(shape) - space
    lengths: dict[int, int] = {}
    """The lengths of the windows along dims that can be split."""
    reduces: dict[str, str] = {}
    for dim, want in enumerate(sizes, first):
        if is_average and want == 1:
            reduces[f"d{dim}"] = "sum"  # weighted averages of the shards are summed
        elif want and shape[dim] and shape[dim] % want == 0:
            lengths[dim] = shape[dim] // want
    free: Dims = tuple(
        name if dim < first or dim in lengths else None for dim, name in enumerate(names)
    )
    given = tuple(
        name if name in reduces else either for name, either in zip(names, free, strict=True)
    )

    def lower(context: SplitContext) -> Callable[..., torch.Tensor] | None:
        mine, result = context.inputs[0].local_shape(), context.outputs[0].local_shape()
        exchanges = [
            plan_exchange(
                context, f"d{dim}", dim, (shape[dim], sizes[dim - first]), _looks_at(length)
            )
            for dim, length in lengths.items()
            if context.axes(f"d{dim}")
        ]
        if not exchanges and not context.axes(*reduces) and not is_empty(mine):
            return None
        share = math.prod(
            mine[dim] / max(shape[dim], 1)
            for dim in range(first, len(shape))
            if names[dim] in reduces
        )
        local_sizes = [max(size, 1) for size in result[first:]]

        def run(input: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            for get in exchanges:
                input = get(input)
            made = operator(pad_empty_dims(input), local_sizes)
            return crop(made if share == 1 else made * share, result)

        return run

    out = Out(free, (*shape[:first], *sizes))
    linear = [(0,)] if is_average and keeps_sums(input.dtype) else []
    return Spec([(input, given)], [out], reduces=reduces, linear=linear, lower=lower)


def _looks_at(length: int) -> Callable[[Range], Range]:
    return lambda results: (results[0] * length, results[1] * length)


def _average_rule(space: int) -> Callable[..., Spec]:
    operator = getattr(F, f"adaptive_avg_pool{space}d")

    def adaptive_avg_pool(input: torch.Tensor, output_size: Any) -> Spec:
        return _adaptive(input, space, _sizes(input, space, output_size), operator, True)

    return adaptive_avg_pool


def _max_rule(space: int) -> Callable[..., Spec]:
    operator = getattr(F, f"adaptive_max_pool{space}d")

    def adaptive_max_pool(
        input: torch.Tensor, output_size: Any, return_indices: bool = False
    ) -> Spec:
        return _adaptive(input, space, _sizes(input, space, output_size), operator, False)

    return adaptive_max_pool


def _max_and_where_rule(space: int) -> Callable[..., Spec]:
    operator = getattr(F, f"adaptive_max_pool{space}d_with_indices")

    def adaptive_max_pool_with_indices(
        input: torch.Tensor, output_size: Any, return_indices: bool = True
    ) -> Spec:
        sizes = _sizes(input, space, output_size)
        shape = (*input.shape[:-space], *sizes)
        return planes([input], [shape] * 2, space, lambda each: operator(each, sizes))

    return adaptive_max_pool_with_indices


for _space in (1, 2, 3):
    _builtin: Any = torch if _space == 1 else nn_builtins
    rule(f"adaptive_avg_pool{_space}d", inplace=False, by_dtype=True)(_average_rule(_space))
    rule(getattr(F, f"adaptive_max_pool{_space}d"))(_max_rule(_space))
    rule(
        getattr(F, f"adaptive_max_pool{_space}d_with_indices"),
        getattr(_builtin, f"adaptive_max_pool{_space}d"),
        Aten(f"adaptive_max_pool{_space}d"),
    )(_max_and_where_rule(_space))
