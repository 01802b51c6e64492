"""Normalization with statistics of the global tensor.

If the averaged dims are whole, torch's own kernel runs. If they are split, only sums are
communicated, one element per statistic: first for the mean, then for the squares of the centered
values, so that float32 loses no precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.core.mesh import DeviceMesh
from shardwise.rules.helpers.collectives import all_reduce_sum, sum_grads_over
from shardwise.rules.helpers.dims import present_inputs
from shardwise.rules.helpers.local_tensors import widen
from shardwise.rules.registry import rule
from shardwise.rules.spec import Dims, Out, Spec, SplitContext, dims_of
from shardwise.torch_internals import verify_batch_size

Optional = torch.Tensor | None


def moments(
    input: torch.Tensor, dims: list[int], count: int, mesh: DeviceMesh, axes: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean, variance and centered input, over `dims` of `count` elements split over `axes`.

    The dims are kept with size 1. Mean and variance are replicated; the caller must pass them
    through `sum_grads_over` before it combines them with shards.
    """
    mean = all_reduce_sum(input.sum(dims, keepdim=True), mesh, axes) / count
    centered = input - sum_grads_over(mean, mesh, axes)
    variance = all_reduce_sum(centered.square().sum(dims, keepdim=True), mesh, axes) / count
    return mean, variance, centered


def scale_and_shift(normal: torch.Tensor, weight: Optional, bias: Optional) -> torch.Tensor:
    """Multiply by the weight and add the bias, which broadcast."""
    if weight is not None:
        normal = normal * weight
    return normal if bias is None else normal + bias


def _result_alone(norm: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., torch.Tensor]:
    """Adapt a norm that returns statistics to a torch function that returns only the result.

    The torch function's second argument, the global normalized shape, is dropped.
    """

    def run(
        input: torch.Tensor,
        whole: Any = None,
        weight: Optional = None,
        bias: Optional = None,
        eps: float = 1e-5,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        return norm(input, weight, bias, eps)[0]

    return run


# ---- over the last dims: layer_norm, rms_norm


def _trailing(input: torch.Tensor, normalized_shape: Sequence[int]) -> tuple[Dims, int]:
    """Return the factors of the input, and the first normalized dim."""
    first = input.dim() - len(normalized_shape)
    if not normalized_shape or tuple(input.shape[max(first, 0) :]) != tuple(normalized_shape):
        raise RuntimeError(
            f"Given normalized_shape={list(normalized_shape)}, expected input with shape "
            f"[*, {', '.join(map(str, normalized_shape))}], but got input of size "
            f"{list(input.shape)}"
        )
    return dims_of(input), first


@rule("layer_norm")
def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: Optional = None,
    bias: Optional = None,
    *args: Any,
    **kwargs: Any,
) -> Spec:
    names, first = _trailing(input, normalized_shape)

    def lower(context: SplitContext) -> Callable[..., torch.Tensor]:
        split = _split_layer_norm(context, names, first, math.prod(normalized_shape))
        return torch.layer_norm if split is None else _result_alone(split)

    inputs = present_inputs((input, names), (weight, names[first:]), (bias, names[first:]))
    return Spec(inputs, [Out(names, tuple(input.shape))], lower=lower, positions=())


@rule("native_layer_norm")
def native_layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: Optional,
    bias: Optional,
    eps: float,
) -> Spec:
    names, first = _trailing(input, normalized_shape)

    def lower(context: SplitContext) -> Callable[..., Any]:
        split = _split_layer_norm(context, names, first, math.prod(normalized_shape))
        if split is None:
            return torch.native_layer_norm
        return lambda input, normalized_shape, weight, bias, eps: split(input, weight, bias, eps)

    kept = len(normalized_shape)
    statistic = Out((*names[:first], *[None] * kept), (*tuple(input.shape)[:first], *[1] * kept))
    inputs = present_inputs((input, names), (weight, names[first:]), (bias, names[first:]))
    outputs = [Out(names, tuple(input.shape)), statistic, statistic]
    return Spec(inputs, outputs, lower=lower, positions=())


def _split_layer_norm(
    context: SplitContext, names: Dims, first: int, count: int
) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None:
    """Return a function for result, mean and reciprocal deviation; None if no normalized dim is
    split.
    """
    axes = context.axes(*names[first:])
    if not axes:
        return None
    dims = list(range(first, len(names)))

    def run(
        input: torch.Tensor, weight: Optional, bias: Optional, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, variance, centered = moments(widen(input), dims, count, context.mesh, axes)
        scale = (variance + eps).rsqrt()
        result = scale_and_shift(centered * sum_grads_over(scale, context.mesh, axes), weight, bias)
        kept = (input if weight is None else weight).dtype
        return result.to(input.dtype), mean.detach().to(kept), scale.detach().to(kept)

    return run


@rule("rms_norm")
def rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: Optional = None,
    eps: float | None = None,
) -> Spec:
    names, first = _trailing(input, normalized_shape)
    count = math.prod(normalized_shape)
    dims = tuple(range(first, len(names)))

    def lower(context: SplitContext) -> Callable[..., torch.Tensor]:
        axes = context.axes(*names[first:])
        if not axes:
            return torch.rms_norm

        def run(
            input: torch.Tensor,
            normalized_shape: Sequence[int],
            weight: Optional = None,
            eps: float | None = None,
        ) -> torch.Tensor:
            wide = widen(input)
            squares = (
                all_reduce_sum(wide.square().sum(dims, keepdim=True), context.mesh, axes) / count
            )
            smallest = torch.finfo(wide.dtype).eps if eps is None else eps
            scale = sum_grads_over((squares + smallest).rsqrt(), context.mesh, axes)
            return scale_and_shift(wide * scale, weight, None).to(input.dtype)

        return run

    inputs = present_inputs((input, names), (weight, names[first:]))
    return Spec(inputs, [Out(names, tuple(input.shape))], lower=lower, positions=())


# ---- over groups of channels


def channels(input: torch.Tensor) -> Dims:
    """Return the factors of a batch of channels: n, c, and the spatial dims."""
    return ("n", "c", *(f"s{at}" for at in range(input.dim() - 2)))[: input.dim()]


def as_channels(tensor: Optional, ndim: int) -> Optional:
    """Reshape a tensor of one value per channel so that it broadcasts against the input."""
    return None if tensor is None else tensor.reshape(-1, *[1] * (ndim - 2))


@rule("group_norm")
def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: Optional = None,
    bias: Optional = None,
    *args: Any,
    **kwargs: Any,
) -> Spec:
    names = channels(input)
    shape = tuple(input.shape)
    if len(shape) < 2 or num_groups <= 0 or shape[1] % num_groups:
        raise RuntimeError(
            f"Expected number of channels in input to be divisible by num_groups, but got input "
            f"of shape {list(shape)} and num_groups={num_groups}"
        )

    def lower(context: SplitContext) -> Callable[..., torch.Tensor]:
        pieces = math.prod(context.mesh.shape[axis] for axis in context.axes("c"))
        # If each rank has whole groups, their statistics stay on the rank.
        whole_groups = num_groups % pieces == 0
        if not whole_groups or context.axes(*names[2:]):
            pieces = pieces if whole_groups else 1
            return _result_alone(_split_group_norm(context, names, shape, num_groups, pieces))
        if pieces == 1:
            return torch.group_norm
        groups = num_groups // pieces
        return _result_alone(lambda input, *rest: (torch.group_norm(input, groups, *rest),))

    inputs = present_inputs((input, names), (weight, ("c",)), (bias, ("c",)))
    return Spec(inputs, [Out(names, shape)], lower=lower, positions=("c",))


@rule("native_group_norm")
def native_group_norm(
    input: torch.Tensor,
    weight: Optional,
    bias: Optional,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> Spec:
    """Statistics are returned too; their groups are whole, also if each rank has its own groups."""
    names, shape = channels(input), tuple(input.shape)

    def lower(context: SplitContext) -> Callable[..., Any]:
        if context.axes(*names[1:]):
            split = _split_group_norm(context, names, shape, group, 1)
            return lambda input, weight, bias, *_, **__: split(input, weight, bias, eps)
        rows = context.inputs[0].local_shape()[0]
        return lambda input, weight, bias, *_, **__: torch.native_group_norm(
            input.contiguous(), weight, bias, rows, C, HxW, group, eps
        )

    inputs = present_inputs((input, names), (weight, ("c",)), (bias, ("c",)))
    outputs = [Out(names, shape), *[Out(("n", None), (N, group))] * 2]
    return Spec(inputs, outputs, lower=lower, positions=("c",))


@rule(F.group_norm)
def checked_group_norm(input: torch.Tensor, num_groups: int, *args: Any, **kwargs: Any) -> Spec:
    """Refuse one value per channel, as F.group_norm does; torch.group_norm accepts it."""
    spec = group_norm(input, num_groups, *args, **kwargs)
    size = list(input.shape)
    verify_batch_size([size[0] * size[1] // num_groups, num_groups, *size[2:]])
    return spec


def _split_group_norm(
    context: SplitContext, names: Dims, shape: tuple[int, ...], num_groups: int, pieces: int
) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return a function for result, mean and reciprocal deviation of groups on several ranks.

    Sums per channel are added to sums per group, then summed over the ranks.

    Arguments:
        pieces: the number of ranks that the groups are split over, each with whole groups.
    """
    axes = context.axes(*names[2:], *(() if pieces > 1 else ("c",)))
    per_group = shape[1] // num_groups
    count = per_group * math.prod(shape[2:])
    groups = num_groups // pieces
    start, _ = context.inputs[0].range(1)

    def run(
        input: torch.Tensor, weight: Optional, bias: Optional, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = widen(input)
        wide = wide.flatten(2) if wide.dim() > 2 else wide.unsqueeze(2)
        first = start // per_group if pieces > 1 else 0
        group = torch.arange(start, start + wide.shape[1], device=wide.device) // per_group - first

        def average(values: torch.Tensor) -> torch.Tensor:
            sums = values.new_zeros(values.shape[0], groups).index_add(1, group, values.sum(2))
            return all_reduce_sum(sums, context.mesh, axes) / count

        def spread(statistic: torch.Tensor) -> torch.Tensor:
            return sum_grads_over(statistic, context.mesh, axes)[:, group].unsqueeze(2)

        mean = average(wide)
        centered = wide - spread(mean)
        scale = (average(centered.square()) + eps).rsqrt()
        result = (centered * spread(scale)).reshape(input.shape)
        weight, bias = (as_channels(each, input.dim()) for each in (weight, bias))
        result = scale_and_shift(result, weight, bias)
        return result.to(input.dtype), mean.to(input.dtype), scale.to(input.dtype)

    return run
