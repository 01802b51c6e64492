"""Dropout, rrelu: products with noise that belongs to the global tensor, not to the shard."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from shardwise import random
from shardwise.layout import Layout
from shardwise.rules.calls import composed
from shardwise.rules.random_ops import noise, noise_like
from shardwise.rules.registry import handler, name_of
from shardwise.tensor import DTensor, as_local

_ALPHA = 1.7580993408473766  # what SELU saturates at


@handler("dropout", "dropout_", "feature_dropout", "feature_dropout_")
@handler("alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_")
def dropout(func: Any, args: Any, kwargs: Any) -> Any:
    """All the dropouts, of `torch` and of `torch.nn.functional`.

    Pending sums flow, as the mask is the same on the ranks that hold contributions.
    """
    name = name_of(func)

    def applied(
        input: Any,
        p: float = 0.5,
        training: bool = func is F.dropout,
        inplace: bool = False,
        train: bool | None = None,
    ) -> Any:
        if not 0 <= p <= 1:
            with as_local():
                func(torch.empty(1, 1, device="meta"), p, True)  # torch's own complaint
        training = training if train is None else train
        if not training or p == 0 or input.numel() == 0:
            return input
        changes = inplace or name.endswith("_")
        mask = _kept(input, p, is_feature="feature" in name, scaled="alpha" not in name)
        if "alpha" not in name or p == 1:
            return input.mul_(mask) if changes else input * mask
        scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
        shift = (mask - 1) * (_ALPHA * scale) + _ALPHA * scale * p
        if changes:
            return input.mul_(mask * scale).add_(shift)
        return input * (mask * scale) + shift

    return applied(*args, **kwargs)


@composed("native_dropout")
def native_dropout(input: Any, p: float, train: bool | None) -> tuple[Any, Any]:
    """The result, and the mask as bools."""
    if train is False or p == 0 or input.numel() == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    mask = _kept(input, p, is_feature=False, scaled=True)
    return input * mask, mask != 0


def _kept(input: DTensor, p: float, *, is_feature: bool, scaled: bool) -> DTensor:
    """The mask; with the scale that keeps the mean, if `scaled`."""
    layout = input._layout
    if is_feature:
        if input.dim() < 2:
            raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
        shape = (*layout.shape[:2], *[1] * (layout.ndim - 2))
        order, cuts = layout.shard_order[:2], layout.cuts[:2]
        layout = Layout(layout.mesh, shape, dict(enumerate(order)), {}, dict(enumerate(cuts)))
    value = 1 / (1 - p) if scaled and p < 1 else 1.0
    dtype = input.dtype if input.is_floating_point() else torch.get_default_dtype()

    def sampler(key: int, layout: Layout, dtype: torch.dtype, device: Any) -> torch.Tensor:
        return random.bernoulli(key, layout, 1 - p, dtype, device, value)

    return noise(sampler, layout, dtype=dtype, device=input.device)


# ---- a leaky relu whose slope is random


@handler("rrelu", "rrelu_")
def rrelu(func: Any, args: Any, kwargs: Any) -> Any:
    """In training; a leaky relu with the mean slope else."""

    def applied(
        input: Any,
        lower: float = 1 / 8,
        upper: float = 1 / 3,
        training: bool = False,
        inplace: Any = False,  # torch.rrelu has its generator here
        generator: Any = None,
    ) -> Any:
        if isinstance(inplace, torch.Generator):
            inplace, generator = False, inplace
        inplace = inplace or name_of(func) == "rrelu_"
        if not training:
            return F.leaky_relu(input, (lower + upper) / 2, inplace=bool(inplace))
        made = noise_like(random.uniform, input, lower, upper, generator=generator)
        slopes = torch.where(input.detach() <= 0, made, 1.0)
        return input.mul_(slopes) if inplace else input * slopes

    return applied(*args, **kwargs)
