"""Patches (F.unfold, F.fold): one dim combines channels and kernel positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwise.core.mesh import DeviceMesh
from shardwise.rules.helpers.chunks import same_units
from shardwise.rules.helpers.padding import crop, is_empty, pad_empty_dims
from shardwise.rules.helpers.windows import Window, per_dim
from shardwise.rules.registry import rule
from shardwise.rules.spec import Out, Spec, SplitContext
from shardwise.torch_internals import nn_builtins


@rule("im2col", inplace=False)
def im2col(input: torch.Tensor, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Spec:
    """Extract patches from planes."""
    kernel, apart, around, step = (
        per_dim(each, 2) for each in (kernel_size, dilation, padding, stride)
    )
    counts = [
        Window(*each).count
        for each in zip(input.shape[-2:], kernel, step, around, around, apart, strict=True)
    ]
    if min(counts) < 1 or input.dim() not in (3, 4):
        raise RuntimeError(f"kernel {kernel_size}, input {tuple(input.shape)}")
    channels = input.shape[-3]
    shape = (*input.shape[:-3], channels * math.prod(kernel), math.prod(counts))
    return _patches(
        input,
        3,
        shape,
        channels,
        lambda local: nn_builtins.im2col(local, kernel, apart, around, step),
    )


@rule("col2im", inplace=False)
def col2im(
    input: torch.Tensor,
    output_size: Any,
    kernel_size: Any,
    dilation: Any,
    padding: Any,
    stride: Any,
) -> Spec:
    """Add patches into planes."""
    size, kernel, apart, around, step = (
        per_dim(each, 2) for each in (output_size, kernel_size, dilation, padding, stride)
    )
    if input.dim() not in (2, 3) or input.shape[-2] % math.prod(kernel):
        raise RuntimeError(f"kernel {kernel_size}, input {tuple(input.shape)}")
    channels = input.shape[-2] // math.prod(kernel)
    return _patches(
        input,
        2,
        (*input.shape[:-2], channels, *size),
        channels,
        lambda local: nn_builtins.col2im(local, size, kernel, apart, around, step),
    )


def _patches(
    input: torch.Tensor,
    count: int,
    shape: tuple[int, ...],
    channels: int,
    operator: Callable[[torch.Tensor], torch.Tensor],
) -> Spec:
    """Return the spec: batch and channels (the first of the last `count` dims) are free."""
    batch = ("n",) if input.dim() > count else ()
    of_channel = input.shape[-count] // max(channels, 1)
    sizes = input.shape[-count], shape[len(batch)]

    def allows(splits: Mapping[str, tuple[int, ...]], mesh: DeviceMesh) -> bool:
        return "c" not in splits or same_units(channels, sizes, mesh, splits["c"])

    def lower(context: SplitContext) -> Callable[..., torch.Tensor] | None:
        result = context.outputs[0].local_shape()
        if not is_empty(result):
            return None
        amounts = (1, of_channel) if batch else (of_channel,)
        return lambda input, *_, **__: crop(operator(pad_empty_dims(input, amounts)), result)

    dims = (*batch, "c", *(None,) * (count - 1))
    out = Out((*batch, "c", *(None,) * (len(shape) - len(batch) - 1)), shape)
    return Spec([(input, dims)], [out], linear=[(0,)], lower=lower, allows=allows)
