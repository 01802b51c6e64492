"""Convolutions, and patches (F.unfold, F.fold).

The batch and the channels of the result are free; the channels of the input are summed. Along
spatial dims each rank receives the rows that its results read (`rules.helpers.halo_exchange`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shardwise.core.box import Range
from shardwise.core.mesh import DeviceMesh
from shardwise.rules.helpers.dims import clip, same_units
from shardwise.rules.helpers.halo_exchange import Window, WindowExchange, per_dim, plan_exchange
from shardwise.rules.helpers.local_tensors import crop, is_empty, pad, pad_empty_dims
from shardwise.rules.registry import rule
from shardwise.rules.spec import Dims, Out, Spec, SplitContext
from shardwise.torch_internals import nn_builtins

_FORWARD: dict[int, Callable[..., torch.Tensor]]
_FORWARD = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
_TRANSPOSED: dict[int, Callable[..., torch.Tensor]]
_TRANSPOSED = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}


@dataclass(frozen=True, slots=True)
class Convolution:
    """One convolution, with the sizes of the global tensors."""

    input: tuple[int, ...]
    windows: tuple[Window, ...]
    """One window per spatial dim; for a transposed convolution the results that each *input* adds
    to."""
    groups: int
    result: tuple[int, ...]
    """The shape of the result."""
    output_padding: tuple[int, ...] | None = None
    """None unless the convolution is transposed."""

    @property
    def is_transposed(self) -> bool:
        """Whether the convolution is transposed (conv_transpose2d)."""
        return self.output_padding is not None

    @property
    def first(self) -> int:
        """The first spatial dim; the dim before it has the channels."""
        return len(self.input) - len(self.windows)

    def spec(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Spec:
        """Return the spec; factors: n batch, c and o channels, x0, x1, ... spatial dims."""
        space = tuple(f"x{at}" for at in range(len(self.windows)))
        batch = ("n",) if self.first == 2 else ()
        kernel = (None,) * len(space)
        c, o = ("c", "o") if self.groups == 1 else ("g", "g")
        # with groups, the other channel dim of the weight is whole
        rest = None if self.groups > 1 else (o if self.is_transposed else c)
        inputs: list[tuple[torch.Tensor, Dims]] = [
            (input, (*batch, c, *space)),
            (weight, (c if self.is_transposed else o, rest, *kernel)),
        ]
        if bias is not None:
            inputs.append((bias, (o,)))
        extra = (2,) if bias is not None else ()
        return Spec(
            inputs,
            [Out((*batch, o, *space), self.result)],
            reduces={"c": "sum"} if self.groups == 1 else {},
            linear=[(0, *extra), (1, *extra)],
            additive=extra,
            lower=self.lower,
            allows=self.allows,
            positions=(c, o, *space),
        )

    def allows(self, splits: Mapping[str, tuple[int, ...]], mesh: DeviceMesh) -> bool:
        """Return whether each rank has whole groups: the same of input and result channels."""
        channels = [self.input[self.first - 1], self.result[self.first - 1]]
        return "g" not in splits or same_units(self.groups, channels, mesh, splits["g"])

    def needs(self, at: int, results: Range) -> Range:
        """Return the inputs along a spatial dim that some results depend on."""
        window = self.windows[at]
        if not self.is_transposed:
            return window.needs(results)
        first, end = results[0] + window.before, results[1] + window.before
        if results[0] >= results[1]:
            return 0, 0
        found = -(-(first - window.reach + 1) // window.stride), (end - 1) // window.stride + 1
        return clip(found, window.size)

    def lower(self, context: SplitContext) -> Callable[..., torch.Tensor] | None:
        """Return the local convolution: fewer groups, exchanged windows, padded empty dims."""
        space = [at for at in range(len(self.windows)) if f"x{at}" in context.splits]
        empty = any(is_empty(each.local_shape()) for each in (*context.inputs, *context.outputs))
        if not space and "g" not in context.splits and not empty:
            return None
        exchanges = [self.exchange(context, at) for at in space]
        groups, missing = _channels(self, context)
        make = _transposed if self.is_transposed else _forward
        sides, operator = make(self, context, space, groups)
        result = context.outputs[0].local_shape()

        def run(
            input: torch.Tensor,
            weight: torch.Tensor,
            bias: torch.Tensor | None = None,
            *_: Any,
            **__: Any,
        ) -> torch.Tensor:
            for get in exchanges:
                input = get(input)
            return crop(operator(*missing(pad(input, sides), weight, bias)), result)

        return run

    def exchange(self, context: SplitContext, at: int) -> WindowExchange:
        """Plan the exchange along one spatial dim: the inputs of each rank's results."""
        dim = self.first + at
        return plan_exchange(
            context, f"x{at}", dim, (self.input[dim], self.result[dim]), partial(self.needs, at)
        )


Local = tuple[dict[int, Range], Callable[..., torch.Tensor]]
"""The padding of each dim of a rank's window, and the function that then runs on it."""


def _forward(conv: Convolution, context: SplitContext, space: Sequence[int], groups: int) -> Local:
    windows, result = conv.windows, context.outputs[0]
    sides: dict[int, Range] = {}
    padding = [window.before for window in windows]
    for at, window in enumerate(windows):
        if at in space or window.before != window.after:
            dim = conv.first + at
            sides[dim] = window.padding(result.range(dim))
            padding[at] = 0
    strides, dilation = [each.stride for each in windows], [each.dilation for each in windows]
    operator = _FORWARD[len(windows)]
    return sides, lambda input, weight, bias: operator(
        input, weight, bias, strides, padding, dilation, groups
    )


def _transposed(
    conv: Convolution, context: SplitContext, space: Sequence[int], groups: int
) -> Local:
    assert conv.output_padding is not None, "it is transposed"
    windows, result = conv.windows, context.outputs[0]
    padding, output_padding = [window.before for window in windows], list(conv.output_padding)
    sides: dict[int, Range] = {}
    cuts: dict[int, Range] = {}
    for at in space:
        window, dim = windows[at], conv.first + at
        mine = result.range(dim)
        have = conv.needs(at, mine)
        padding[at] = output_padding[at] = 0
        if have[0] == have[1]:
            # no input adds to these results, but torch needs one: a zero
            sides[dim] = 0, 1
            cuts[dim] = 0, mine[1] - mine[0] - window.reach
        else:
            start = have[0] * window.stride - window.before
            stop = (have[1] - 1) * window.stride - window.before + window.reach
            cuts[dim] = start - mine[0], mine[1] - stop
    strides, dilation = [each.stride for each in windows], [each.dilation for each in windows]
    operator = _TRANSPOSED[len(windows)]

    def run(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # What is cut is padded at some places, and the bias is added to this padding too.
        first = None if cuts else bias
        made = operator(input, weight, first, strides, padding, output_padding, groups, dilation)
        if bias is None or not cuts:
            return pad(made, cuts)
        return pad(made, cuts) + bias.to(made.dtype).view(-1, *[1] * len(windows))

    return sides, run


def _channels(conv: Convolution, context: SplitContext) -> tuple[int, Callable[..., Any]]:
    """Return the number of groups of this rank, and a function that pads empty channels or
    batch."""
    channel, groups = conv.first - 1, conv.groups
    each_in = each_out = 1
    if "g" in context.splits:
        each_in, each_out = conv.input[channel] // groups, conv.result[channel] // groups
        groups = max(context.inputs[0].local_shape()[channel] // each_in, 1)
    of_weight = (each_in, each_out) if conv.is_transposed else (each_out, each_in)
    to_fill = ((1, each_in) if channel else (each_in,)), of_weight, (each_out,)

    def missing(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
        return [
            None if tensor is None else pad_empty_dims(tensor, amounts)
            for tensor, amounts in zip(tensors, to_fill, strict=True)
        ]

    return groups, missing


# ---- the rules


@rule("conv1d", "conv2d", "conv3d", inplace=False)
def conv(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Spec:
    """Return the spec of a convolution: each result reads a window of the input."""
    space, dilations, strides = _space(input, weight, stride, dilation)
    sizes = tuple(input.shape[-space:])
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(p, p) for p in per_dim(0 if padding == "valid" else padding, space)]
    windows = tuple(
        Window(size, kernel, step, *side, apart)
        for size, kernel, step, side, apart in zip(
            sizes, weight.shape[2:], strides, sides, dilations, strict=True
        )
    )
    given, result = _shapes(input, weight, [each.count for each in windows], weight.shape[0])
    channels = given[-space - 1]
    if channels != weight.shape[1] * groups or weight.shape[0] % groups:
        raise RuntimeError(f"channels: {channels} of the input, weight {tuple(weight.shape)}")
    if padding == "same" and set(strides) != {1}:
        raise RuntimeError("padding='same' is not supported for strided convolutions")
    return Convolution(given, windows, groups, result).spec(input, weight, bias)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", inplace=False)
def conv_transpose(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Spec:
    """Return the spec of a transposed convolution: each input adds to a window of the result."""
    space, dilations, strides = _space(input, weight, stride, dilation)
    more = per_dim(output_padding, space)
    windows = tuple(
        Window(size, kernel, step, before, before, apart)
        for size, kernel, step, before, apart in zip(
            input.shape[-space:],
            weight.shape[2:],
            strides,
            per_dim(padding, space),
            dilations,
            strict=True,
        )
    )
    sizes = [
        (each.size - 1) * each.stride - 2 * each.before + each.reach + extra
        for each, extra in zip(windows, more, strict=True)
    ]
    given, result = _shapes(input, weight, sizes, weight.shape[1] * groups)
    if given[-space - 1] != weight.shape[0] or weight.shape[0] % groups:
        raise RuntimeError(f"channels: {given[-space - 1]}, weight {tuple(weight.shape)}")
    return Convolution(given, windows, groups, result, more).spec(input, weight, bias)


@rule("convolution", inplace=False)
def convolution(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Spec | None:
    """Return the spec of aten's operator for both kinds."""
    if transposed:
        return conv_transpose(
            input, weight, bias, stride, padding, output_padding, groups, dilation
        )
    return conv(input, weight, bias, stride, padding, dilation, groups)


def _space(
    input: torch.Tensor, weight: torch.Tensor, stride: Any, dilation: Any
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the number of spatial dims, and dilation and stride along each."""
    space = weight.dim() - 2
    if space not in _FORWARD or input.dim() not in (space + 1, space + 2):
        raise RuntimeError(f"dims: input {tuple(input.shape)}, weight {tuple(weight.shape)}")
    return space, per_dim(dilation, space), per_dim(stride, space)


def _shapes(
    input: torch.Tensor, weight: torch.Tensor, sizes: Sequence[int], channels: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of input and result."""
    if min(sizes) <= 0:
        raise RuntimeError(f"kernel {tuple(weight.shape[2:])}, input {tuple(input.shape)}")
    given = tuple(input.shape)
    return given, (*given[: -len(sizes) - 1], channels, *sizes)


# ---- patches (F.unfold, F.fold): one dim combines channels and kernel positions


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
