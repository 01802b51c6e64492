"""Where random numbers come from.

Elsewhere each element has numbers of its own, by its global position (`random`). A program that is
being made (`shardwise.export`) has only torch's operators: each rank draws the *whole* tensor off
torch's default generator, as one process would, and takes its piece. Generators that were in the
same state on all ranks are so afterwards, also where a piece is empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise import random, world
from shardwise.layout import Layout

Sampler = Callable[..., torch.Tensor]
"""One of those of `shardwise.random`."""

_aten: Any = torch.ops.aten


def drawn(
    sampler: Sampler,
    layout: Layout,
    *numbers: Any,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """This rank's piece of a tensor of random numbers.

    Arguments:
        sampler: one of those of `shardwise.random`, and its `numbers`.
    """
    if world.current().draws_whole:
        return _drawn_whole(sampler, layout, *numbers, dtype=dtype)
    if device.type == "meta":  # torch draws nothing for it either
        return torch.empty(layout.local_shape(), dtype=dtype, device=device)
    key = random.draw_key(layout.mesh, generator)
    return sampler(key, layout, *numbers, dtype=dtype, device=device)


def _drawn_whole(
    sampler: Sampler, layout: Layout, *numbers: Any, dtype: torch.dtype
) -> torch.Tensor:
    empty = torch.empty(layout.shape, dtype=dtype, device="meta")
    if sampler is random.bernoulli:
        chance, divisor = (*numbers, 1.0)[:2]
        piece = _piece(layout, _aten.bernoulli.p(empty, chance))
        return piece if divisor == 1 else piece.div(divisor)
    return _piece(layout, _FILLED[sampler](empty, *numbers))


def _piece(layout: Layout, whole: torch.Tensor) -> torch.Tensor:
    if not any(layout.shard_order):
        return whole
    # A copy: a view would keep the whole tensor alive.
    return layout.piece_of(whole).clone(memory_format=torch.contiguous_format)


def _uniform(empty: torch.Tensor, low: float = 0.0, high: float = 1.0) -> Any:
    if (low, high) == (0, 1):  # torch cannot load a call that leaves out an argument named `from`
        return _aten.rand_like.default(empty)
    return _aten.uniform.default(empty, low, high)


def _integers(empty: torch.Tensor, low: int, high: int) -> Any:
    if high == 2**63:  # more than an argument can be; it is what `random` has by itself
        return _aten.random.default(empty)
    return _aten.randint_like.low_dtype(empty, low, high)


# What each writes to a new tensor. These are not in place: a program after `run_decompositions()`
# has no writes.
_FILLED: dict[Any, Callable[..., Any]] = {
    random.uniform: _uniform,
    random.normal: _aten.normal_functional.default,
    random.log_normal: _aten.log_normal.default,
    random.exponential: _aten.exponential.default,
    random.geometric: _aten.geometric.default,
    random.cauchy: _aten.cauchy.default,
    random.integers: _integers,
    random.permutation: lambda empty: torch.randperm(
        len(empty), dtype=empty.dtype, device=empty.device
    ),
}
