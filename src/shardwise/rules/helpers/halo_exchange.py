"""Halo exchange: each rank receives the inputs that its results read along a split dim.

For convolutions, pooling, interpolation and differences. A result reads a range of the input, its
window, which may reach into the shards of neighbours. Each rank receives exactly the rows that its
results read, from the ranks that hold them, and sends their gradients back. All sends and receives
follow from global sizes, so all ranks agree without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm import communicator
from shardwise.core.box import Range
from shardwise.core.mesh import DeviceMesh
from shardwise.rules.helpers.dims import chunks_of, clip, overlap
from shardwise.rules.spec import SplitContext


@dataclass(frozen=True, slots=True)
class Window:
    """The inputs that each result reads along one dim: `kernel` of them, `dilation` apart.

    The window of the first result starts `before` elements in front of the input; each next window
    starts `stride` further.
    """

    size: int
    """The length of the input."""
    kernel: int
    stride: int = 1
    before: int = 0
    """The padding in front of the input; `after` is the padding behind it."""
    after: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        """The length of one window, from its first to its last input."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def count(self) -> int:
        """The number of results; not positive if the kernel does not fit."""
        return (self.size + self.before + self.after - self.reach) // self.stride + 1

    def looks_at(self, results: Range) -> Range:
        """Return the inputs that some results read, including padding."""
        first, end = results
        start = first * self.stride - self.before
        return start, start if first >= end else (end - 1) * self.stride - self.before + self.reach

    def needs(self, results: Range) -> Range:
        """Return the inputs that some results read, without padding."""
        return clip(self.looks_at(results), self.size)

    def padding(self, results: Range) -> Range:
        """Return the padding before and after the needed inputs.

        For no results it is one window, so that the local operator does not refuse its input.
        """
        if results[0] >= results[1]:
            return 0, self.reach
        start, end = self.looks_at(results)
        first, last = self.needs(results)
        return first - start, end - last


# ---- the exchange


def plan_exchange(
    context: SplitContext,
    factor: str,
    dim: int,
    sizes: tuple[int, int],
    needs: Callable[[Range], Range],
) -> WindowExchange:
    """Plan the exchange that gives each rank the inputs of its results.

    Arguments:
        factor: the factor of the input's dim and of the result's dim.
        dim: the dim of the input.
        sizes: the global sizes of the input's dim and of the result's dim.
        needs: maps a range of results to the inputs that they read.
    """
    axes = context.axes(factor)
    held, results = (chunks_of(size, context.mesh, axes) for size in sizes)
    return WindowExchange(context.mesh, axes, dim, held, tuple(map(needs, results)))


@dataclass(frozen=True, slots=True)
class WindowExchange:
    """An exchange along one dim: each rank holds a range and wants another, its window.

    Forward: each rank receives its window. Backward: each rank receives the gradients of all
        windows that overlap the range it holds, and adds them.
    """

    mesh: DeviceMesh
    axes: tuple[int, ...]
    """The axes that split the dim, outer to inner."""
    dim: int
    held: tuple[Range, ...]
    """The range that each rank along the axes holds; together the whole dim."""
    wanted: tuple[Range, ...]
    """The range that each rank wants."""

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        """Return this rank's window."""
        if self.is_local:
            me = communicator(self.mesh, self.axes).index
            return _narrow(local, self.dim, self.held[me], self.wanted[me])
        return _DifferentiableExchange.apply(local, self, False)  # type: ignore[no-any-return,no-untyped-call]

    @property
    def is_local(self) -> bool:
        """Whether every rank already holds its window."""
        return all(
            start == stop or (first <= start and stop <= last)
            for (first, last), (start, stop) in zip(self.held, self.wanted, strict=True)
        )

    def run(self, local: torch.Tensor, is_back: bool) -> torch.Tensor:
        """Move from held ranges to windows, or add the windows' gradients into the held ranges."""
        have, get = (self.wanted, self.held) if is_back else (self.held, self.wanted)
        group = communicator(self.mesh, self.axes)
        me = group.index
        nothing = (have[me][0], have[me][0])
        own = _narrow(local, self.dim, have[me], overlap(have[me], get[me]))
        sent = [
            _narrow(
                local, self.dim, have[me], nothing if peer == me else overlap(have[me], get[peer])
            )
            for peer in range(group.size)
        ]
        comes = [overlap(piece, get[me]) for piece in have]
        lengths = [0 if peer == me else end - start for peer, (start, end) in enumerate(comes)]
        shape = list(local.shape)
        shapes = [(*shape[: self.dim], each, *shape[self.dim + 1 :]) for each in lengths]
        parts = group.all_to_all(sent, shapes)
        parts[me] = own
        if not is_back:
            return torch.cat(parts, self.dim)
        shape[self.dim] = get[me][1] - get[me][0]
        result = local.new_zeros(shape)
        for where, piece in zip(comes, parts, strict=True):
            _narrow(result, self.dim, get[me], where).add_(piece)
        return result


class _DifferentiableExchange(torch.autograd.Function):
    """Forward: the exchange. Backward: its transpose, by the same function, so that second
    derivatives work."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, exchange: WindowExchange, is_back: bool
    ) -> torch.Tensor:
        ctx.exchange, ctx.is_back = exchange, is_back
        return exchange.run(local.detach(), is_back)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        back = ctx.exchange, not ctx.is_back
        return _DifferentiableExchange.apply(gradients[0], *back), None, None  # type: ignore[no-untyped-call]


def _narrow(tensor: torch.Tensor, dim: int, held: Range, wanted: Range) -> torch.Tensor:
    """Narrow a tensor that holds one range to another range within it."""
    if wanted[0] == wanted[1]:
        return tensor.narrow(dim, 0, 0)
    return tensor.narrow(dim, wanted[0] - held[0], wanted[1] - wanted[0])


def per_dim(value: Any, count: int) -> tuple[Any, ...]:
    """Return one value per spatial dim; torch also accepts one value for all."""
    if isinstance(value, Sequence):
        return tuple(value) * count if len(value) == 1 else tuple(value)
    return (value,) * count
