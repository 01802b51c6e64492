"""Windows: operators whose results look at a stretch of the input, along dims that are split.

A convolution along a split dim needs rows that its neighbours hold. Here each rank gets exactly
the rows that its results look at, wherever they lie, and sends their gradients back. Which rows go
where is arithmetic on global sizes, so that all ranks agree without asking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.box import Range
from shardwise.comm import communicator
from shardwise.mesh import DeviceMesh
from shardwise.rules.chunks import clipped, overlap, pieces
from shardwise.rules.spec import Here


@dataclass(frozen=True, slots=True)
class Window:
    """What each result along one dim looks at: `kernel` inputs, `dilation` apart.

    The first one starts `before` in front of the input, and the next each `stride` further.
    """

    size: int
    """The length of the input."""
    kernel: int
    stride: int = 1
    before: int = 0
    """How far the input is padded in front, and behind it:"""
    after: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        """How many inputs lie between the first and the last of one result, both counted."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def count(self) -> int:
        """The number of results; not positive if the kernel does not fit."""
        return (self.size + self.before + self.after - self.reach) // self.stride + 1

    def looks_at(self, results: Range) -> Range:
        """The inputs of some results, also those that do not exist."""
        first, end = results
        start = first * self.stride - self.before
        return start, start if first >= end else (end - 1) * self.stride - self.before + self.reach

    def needs(self, results: Range) -> Range:
        """The inputs of some results, as far as they exist."""
        return clipped(self.looks_at(results), self.size)

    def padding(self, results: Range) -> Range:
        """How much to add on either side of what is needed; something if nothing is."""
        if results[0] >= results[1]:
            return 0, self.reach
        start, end = self.looks_at(results)
        first, last = self.needs(results)
        return first - start, end - last


# ---- the exchange


def exchange(
    here: Here, factor: str, dim: int, sizes: tuple[int, int], needs: Callable[[Range], Range]
) -> Exchange:
    """The exchange along a dim of the input, so that each rank can make its results.

    Arguments:
        factor: what the dim of the input and that of the result are called.
        dim: the dim of the input.
        sizes: its global size, and that of the result.
        needs: the inputs that a range of results looks at.
    """
    axes = here.axes(factor)
    held, results = (pieces(size, here.mesh, axes) for size in sizes)
    return Exchange(here.mesh, axes, dim, held, tuple(map(needs, results)))


@dataclass(frozen=True, slots=True)
class Exchange:
    """Along one dim every rank holds a range, and wants another: its window.

    Forward: each rank gets its window. Backward: the gradients of all windows that overlap what a
    rank holds are sent to it and added.
    """

    mesh: DeviceMesh
    axes: tuple[int, ...]
    """The axes that split the dim, outer to inner."""
    dim: int
    held: tuple[Range, ...]
    """For each rank along the axes, in their order; together the whole dim."""
    wanted: tuple[Range, ...]
    """For each rank, within the dim."""

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's window, of what it holds."""
        if self.is_local:
            me = communicator(self.mesh, self.axes).index
            return _cut(local, self.dim, self.held[me], self.wanted[me])
        return _Exchange.apply(local, self, False)  # type: ignore[no-any-return,no-untyped-call]

    @property
    def is_local(self) -> bool:
        """Whether every rank holds all that it wants."""
        return all(
            start == stop or (first <= start and stop <= last)
            for (first, last), (start, stop) in zip(self.held, self.wanted, strict=True)
        )

    def run(self, local: torch.Tensor, is_back: bool) -> torch.Tensor:
        """From what is held to the windows, or back."""
        have, get = (self.wanted, self.held) if is_back else (self.held, self.wanted)
        group = communicator(self.mesh, self.axes)
        me = group.index
        nothing = (have[me][0], have[me][0])
        own = _cut(local, self.dim, have[me], overlap(have[me], get[me]))
        sent = [
            _cut(local, self.dim, have[me], nothing if peer == me else overlap(have[me], get[peer]))
            for peer in range(group.size)
        ]
        comes = [overlap(piece, get[me]) for piece in have]
        lengths = [0 if peer == me else end - start for peer, (start, end) in enumerate(comes)]
        shape = list(local.shape)
        shapes = [(*shape[: self.dim], each, *shape[self.dim + 1 :]) for each in lengths]
        pieces = group.all_to_all(sent, shapes)
        pieces[me] = own
        if not is_back:
            return torch.cat(pieces, self.dim)
        shape[self.dim] = get[me][1] - get[me][0]
        result = local.new_zeros(shape)
        for where, piece in zip(comes, pieces, strict=True):
            _cut(result, self.dim, get[me], where).add_(piece)
        return result


class _Exchange(torch.autograd.Function):
    """Forward: the exchange. Backward: its transpose, by this very function, so it can be
    differentiated again."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, exchange: Exchange, is_back: bool) -> torch.Tensor:
        ctx.exchange, ctx.is_back = exchange, is_back
        return exchange.run(local.detach(), is_back)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return _Exchange.apply(gradients[0], ctx.exchange, not ctx.is_back), None, None  # type: ignore[no-untyped-call]


def _cut(tensor: torch.Tensor, dim: int, held: Range, wanted: Range) -> torch.Tensor:
    """A part of what is held."""
    if wanted[0] == wanted[1]:
        return tensor.narrow(dim, 0, 0)
    return tensor.narrow(dim, wanted[0] - held[0], wanted[1] - wanted[0])


def expanded(value: Any, count: int) -> tuple[Any, ...]:
    """One value for each spatial dim, where torch takes one for all."""
    if isinstance(value, Sequence):
        return tuple(value) * count if len(value) == 1 else tuple(value)
    return (value,) * count
