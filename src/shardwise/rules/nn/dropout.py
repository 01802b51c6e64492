"""Dropout and rrelu: products with noise that is indexed by global position."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.core import world
from shardwise.core.layout import Layout
from shardwise.dtensor.tensor import DTensor
from shardwise.random import samplers
from shardwise.rules.helpers.dims import unsplit_spec
from shardwise.rules.make.random import noise, noise_like
from shardwise.rules.registry import Function, composed, handler, name_of, rule
from shardwise.rules.spec import Spec
from shardwise.torch_internals import as_local

_ALPHA = 1.7580993408473766  # the saturation value of SELU


@handler("dropout", "dropout_", "feature_dropout", "feature_dropout_")
@handler("alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_")
def dropout(func: Any, args: Any, kwargs: Any) -> Any:
    """Run any dropout of `torch` or `torch.nn.functional`.

    Pending sums flow through, as all ranks with contributions have the same mask.
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
                func(torch.empty(1, 1, device="meta"), p, True)  # raises torch's own error
        training = training if train is None else train
        if not training or p == 0 or input.numel() == 0:
            return input
        changes = inplace or name.endswith("_")
        if p == 1:  # nothing is drawn
            return input.mul_(0.0) if changes else input * 0.0
        divisor = 1.0 if "alpha" in name else 1 - p
        dtype = input.dtype if input.is_floating_point() else torch.get_default_dtype()
        mask = _kept(input, p, divisor, dtype, is_feature="feature" in name)
        if "alpha" not in name:
            return input.mul_(mask) if changes else input * mask
        scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
        shift = (mask - 1) * (_ALPHA * scale) + _ALPHA * scale * p
        if changes:
            return input.mul_(mask * scale).add_(shift)
        return input * (mask * scale) + shift

    return applied(*args, **kwargs)


@composed("native_dropout")
def native_dropout(input: Any, p: float, train: bool | None) -> tuple[Any, Any]:
    """Return the result, and the mask as bools."""
    if train is False or input.numel() == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    mask = _kept(input, p, 1.0, torch.bool)
    return input * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _kept(
    input: DTensor, p: float, divisor: float, dtype: torch.dtype, *, is_feature: bool = False
) -> DTensor:
    """Return the mask divided by a number: the kept fraction, if the mean is to stay."""
    layout = input._layout
    if is_feature:
        if input.dim() < 2:
            raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
        shape = (*layout.shape[:2], *[1] * (layout.ndim - 2))
        order, cuts = layout.shard_order[:2], layout.cuts[:2]
        layout = Layout(layout.mesh, shape, dict(enumerate(order)), {}, dict(enumerate(cuts)))
    return noise(samplers.bernoulli, layout, 1 - p, divisor, dtype=dtype, device=input.device)


# ---- rrelu: a leaky relu with random slopes


RRELU = Function("rrelu", lambda input, lower, upper: torch.rrelu(input, lower, upper, True))


@rule(RRELU)
def whole_rrelu(input: torch.Tensor, lower: float, upper: float) -> Spec:
    return unsplit_spec([input], input.shape)


@handler("rrelu", "rrelu_")
def rrelu(func: Any, args: Any, kwargs: Any) -> Any:
    """Run rrelu in training, else a leaky relu with the mean slope."""

    def applied(
        input: Any,
        lower: float = 1 / 8,
        upper: float = 1 / 3,
        training: bool = False,
        inplace: Any = False,  # for torch.rrelu this position is the generator
        generator: Any = None,
    ) -> Any:
        if isinstance(inplace, torch.Generator):
            inplace, generator = False, inplace
        inplace = inplace or name_of(func) == "rrelu_"
        if not training:
            return F.leaky_relu(input, (lower + upper) / 2, inplace=bool(inplace))
        if world.current().draws_whole:  # torch draws for negative elements only
            result = RRELU.dispatched(input, lower, upper)
            return input.copy_(result) if inplace else result
        made = noise_like(samplers.uniform, input, lower, upper, generator=generator)
        slopes = torch.where(input.detach() <= 0, made, 1.0)
        return input.mul_(slopes) if inplace else input * slopes

    return applied(*args, **kwargs)
