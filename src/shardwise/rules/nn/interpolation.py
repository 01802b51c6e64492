"""Interpolation: resizing of planes, and sampling at points of a grid.

Batch and channels are free. Along spatial dims that grow by an integer factor the results of a rank
read a few neighbours of its own inputs; other spatial dims are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shardwise.core.box import Range
from shardwise.rules.helpers.dims import clip
from shardwise.rules.helpers.halo_exchange import plan_exchange
from shardwise.rules.helpers.local_tensors import (
    crop,
    is_empty,
    keeps_sums,
    lower_with_padding,
    pad,
    pad_empty_dims,
)
from shardwise.rules.registry import rule
from shardwise.rules.spec import Out, Spec, SplitContext, dims_of

_HALOS = {
    "upsample_nearest1d": 0,
    "upsample_nearest2d": 0,
    "upsample_nearest3d": 0,
    "_upsample_nearest_exact1d": 0,
    "_upsample_nearest_exact2d": 0,
    "_upsample_nearest_exact3d": 0,
    "upsample_linear1d": 1,
    "upsample_bilinear2d": 1,
    "upsample_trilinear3d": 1,
    "_upsample_bilinear2d_aa": 1,
    "upsample_bicubic2d": 2,
    "_upsample_bicubic2d_aa": 2,
    "_upsample_lanczos2d_aa": 3,
}
"""The number of inputs on either side of the nearest one that a result reads, when growing."""


@dataclass(frozen=True, slots=True)
class Resize:
    """A resizing of planes."""

    operator: Callable[..., torch.Tensor]
    """Takes the input, the new sizes, `options` and a scale or None for each spatial dim."""
    input: tuple[int, ...]
    sizes: tuple[int, ...]
    options: tuple[bool, ...]
    """`align_corners`, for operators that have it."""
    scales: tuple[float | None, ...]
    halo: int

    def factor(self, at: int) -> int | None:
        """Return the integer factor by which a spatial dim grows; None if it is not an integer."""
        have, want, scale = self.input[at + 2], self.sizes[at], self.scales[at]
        if not have or want % have or scale not in (None, want // have):
            return None
        return None if any(self.options) and want != have else want // have

    def needs(self, at: int, results: Range) -> Range:
        """Return the range of inputs that a range of results reads, along a dim that grows by an
        integer factor."""
        factor = self.factor(at)
        if factor is None or results[0] >= results[1]:
            return 0, 0
        first, last = results[0] // factor, (results[1] - 1) // factor
        halo = self.halo if factor > 1 else 0
        return clip((first - halo, last + 1 + halo), self.input[at + 2])

    def lower(self, context: SplitContext) -> Callable[..., torch.Tensor] | None:
        """Return the operator on exchanged windows; it crops results that belong to other ranks."""
        shape, box = context.outputs[0].local_shape(), context.outputs[0].box()
        split = [at for at in range(len(self.sizes)) if context.axes(f"d{at + 2}")]
        if not split and not is_empty(shape):
            return None
        sizes, scales = list(self.sizes), list(self.scales)
        exchanges, cuts = [], {}
        for at in split:
            factor, dim = self.factor(at), at + 2
            assert factor is not None, "it can be split"
            length = self.input[dim], self.sizes[at]
            exchanges.append(
                plan_exchange(context, f"d{dim}", dim, length, partial(self.needs, at))
            )
            mine = box.start[dim], box.stop[dim]
            start, stop = self.needs(at, mine)
            sizes[at], scales[at] = max(stop - start, 1) * factor, None
            before = start * factor - mine[0] if start < stop else 0
            cuts[dim] = before, mine[1] - mine[0] - sizes[at] - before

        def run(input: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            for get in exchanges:
                input = get(input)
            made = self.operator(pad_empty_dims(input), sizes, *self.options, *scales)
            return crop(pad(made, cuts), shape)

        return run


def _resize_rule(name: str, halo: int) -> Callable[..., Spec | None]:
    operator = getattr(torch.ops.aten, name).default
    has_options = "nearest" not in name

    def resize(
        input: torch.Tensor,
        output_size: Sequence[int] | None,
        *rest: Any,
        align_corners: bool = False,
        scale_factors: Sequence[float] | None = None,
        **scales_by_name: float | None,
    ) -> Spec | None:
        space = input.dim() - 2
        if has_options and rest:
            align_corners, *rest = rest  # type: ignore[assignment]
        # torch takes them as one list or one by one
        scales = [each for part in (*rest, scale_factors, *scales_by_name.values())
                  for each in (part if isinstance(part, list | tuple) else [part])]  # fmt: skip
        scales = [*scales, *[None] * space][:space] if any(scales) else [None] * space
        sizes = output_size or [
            int(size * scale) for size, scale in zip(input.shape[2:], scales, strict=True)
        ]
        how = Resize(
            operator,
            tuple(input.shape),
            tuple(sizes),
            (align_corners,) if has_options else (),
            tuple(scales),
            halo,
        )
        names = dims_of(input)
        dims = (
            *names[:2],
            *(name if how.factor(at) else None for at, name in enumerate(names[2:])),
        )
        out = Out(dims, (*input.shape[:2], *sizes))
        linear = (
            [(0,)] if keeps_sums(input.dtype) else ()
        )  # integers are rounded, so it is not linear
        return Spec([(input, dims)], [out], linear=linear, lower=how.lower)

    return resize


for _name, _halo in _HALOS.items():
    rule(_name, inplace=False, by_dtype=True)(_resize_rule(_name, _halo))


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d", inplace=False)
def grid_sampler(input: torch.Tensor, grid: torch.Tensor, *args: Any, **kwargs: Any) -> Spec:
    """Each point of the grid may read any element of its plane, so planes are whole."""
    if grid.dim() != input.dim() or grid.shape[0] != input.shape[0]:
        raise RuntimeError(f"grid {tuple(grid.shape)}, input {tuple(input.shape)}")
    points = dims_of(grid)[1:-1]
    inputs = [(input, ("n", "c", *(None,) * len(points))), (grid, ("n", *points, None))]
    shape = (*input.shape[:2], *grid.shape[1:-1])
    function = torch.grid_sampler_2d if len(points) == 2 else torch.grid_sampler_3d
    lower = lower_with_padding(function)
    out = Out(("n", "c", *points), shape)
    return Spec(inputs, [out], linear=[(0,)], lower=lower, positions=())


@rule("affine_grid_generator", inplace=False)
def affine_grid_generator(theta: torch.Tensor, size: Sequence[int], align_corners: bool) -> Spec:
    """Return the spec of one grid per matrix."""
    space = len(size) - 2

    def lower(context: SplitContext) -> Callable[..., torch.Tensor] | None:
        shape = context.outputs[0].local_shape()
        if shape[0] == size[0]:
            return None
        local = [max(shape[0], 1), *size[1:]]
        return lambda theta, *_, **__: crop(
            torch.affine_grid_generator(pad_empty_dims(theta), local, align_corners), shape
        )

    out = Out(("n", *(None,) * (space + 1)), (size[0], *size[2:], space))
    return Spec([(theta, ("n", None, None))], [out], linear=[(0,)], lower=lower)
