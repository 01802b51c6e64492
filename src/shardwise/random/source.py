"""The source of random numbers: by global position, or in an exported program torch's generator.

In eager mode each element has its own number, by its global position (`random.samplers`). A program
that `shardwise.export` records has torch's operators only: each rank draws the *whole* tensor from
torch's default generator, as a single process would, and takes its shard. Generators that agreed on
all ranks agree afterwards, also where a shard is empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.core import world
from shardwise.core.layout import Layout
from shardwise.random import samplers

Sampler = Callable[..., torch.Tensor]
"""A function of `random.samplers` that makes a shard."""

_aten: Any = torch.ops.aten


def draw_shard(
    sampler: Sampler,
    layout: Layout,
    *numbers: Any,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draw this rank's shard of a tensor of random numbers.

    Arguments:
        sampler: the distribution, a function of `random.samplers`.
        numbers: the parameters of the distribution.
    """
    if world.current().draws_whole:
        return _draw_whole(sampler, layout, *numbers, dtype=dtype)
    if device.type == "meta":  # torch draws nothing there either
        return torch.empty(layout.local_shape(), dtype=dtype, device=device)
    key = samplers.draw_key(layout.mesh, generator)
    return sampler(key, layout, *numbers, dtype=dtype, device=device)


def _draw_whole(
    sampler: Sampler, layout: Layout, *numbers: Any, dtype: torch.dtype
) -> torch.Tensor:
    empty = torch.empty(layout.shape, dtype=dtype, device="meta")
    if sampler is samplers.bernoulli:
        chance, divisor = (*numbers, 1.0)[:2]
        shard = _shard_of(layout, _aten.bernoulli.p(empty, chance))
        return shard if divisor == 1 else shard.div(divisor)
    return _shard_of(layout, _OPERATORS[sampler](empty, *numbers))


def _shard_of(layout: Layout, whole: torch.Tensor) -> torch.Tensor:
    if not any(layout.shard_order):
        return whole
    # A copy: a view would keep the whole tensor alive.
    return layout.piece_of(whole).clone(memory_format=torch.contiguous_format)


def _uniform(empty: torch.Tensor, low: float = 0.0, high: float = 1.0) -> Any:
    if (low, high) == (0, 1):  # torch cannot load a call without its argument named `from`
        return _aten.rand_like.default(empty)
    return _aten.uniform.default(empty, low, high)


def _integers(empty: torch.Tensor, low: int, high: int) -> Any:
    if high == 2**63:  # too large for an argument; the default of `random`
        return _aten.random.default(empty)
    return _aten.randint_like.low_dtype(empty, low, high)


# The aten operator of each sampler. They are out of place: a program has no writes after
# `run_decompositions()`.
_OPERATORS: dict[Any, Callable[..., Any]] = {
    samplers.uniform: _uniform,
    samplers.normal: _aten.normal_functional.default,
    samplers.log_normal: _aten.log_normal.default,
    samplers.exponential: _aten.exponential.default,
    samplers.geometric: _aten.geometric.default,
    samplers.cauchy: _aten.cauchy.default,
    samplers.integers: _integers,
    samplers.permutation: lambda empty: torch.randperm(
        len(empty), dtype=empty.dtype, device=empty.device
    ),
}
