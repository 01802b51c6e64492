"""How elements travel: from shards to other shards, to one rank, to all, from one.

Two ranks exchange at most one message, and an element goes only to a rank that needs it and does
not hold it: nobody can move fewer bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm import is_large
from shardwise.comm.trace import running
from shardwise.redistribute.transfer import Swap
from shardwise.sharded.errors import ShardedTensorError
from shardwise.sharded.group import Group
from shardwise.sharded.held import Held
from shardwise.sharded.route import route


@dataclass(frozen=True, slots=True)
class Move:
    """From some shards to others of the same tensor."""

    group: Group
    before: Held
    after: Held
    reason: str = "ShardedTensor.reshard"
    """What it is for, in a trace."""

    @property
    def reverse(self) -> Move:
        """The way back."""
        return Move(self.group, self.after, self.before, self.reason)

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        like: torch.Tensor,
        into: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """This rank's shards after the move, of those before it. Backward: the reverse.

        Arguments:
            like: tells dtype and device, also to a rank that holds nothing.
            into: tensors to write them to. Without, they are new ones, or one of `tensors` where
                that stays as it is.
        """
        group = self.group
        way = route(self.before, self.after, group.ranks, group.rank, into is None)
        local = [each.detach() for each in tensors]
        if into is None:
            stays = way.stays
            results = [
                local[stays[at]] if at in stays else like.new_empty(shape)
                for at, shape in enumerate(way.shapes)
            ]
        else:
            results = list(into)
        parts = {box: local[at][slices] for box, (at, slices) in way.parts.items()}
        places = {box: results[at][slices] for box, (at, slices) in way.places.items()}
        swap = Swap(group.communicator, group.rank, way.given, way.taken)
        with running(self.reason):
            # Few messages start faster than an all-to-all, long ones need no packing: the same
            # on all ranks.
            if way.is_sparse or is_large(way.count * like.itemsize // len(group.ranks)):
                swap.into(parts, places).wait()
            else:
                for box, part in swap.of_boxes(parts, like).wait():
                    places[box].copy_(part)
        return results

    def check_gradients_return(self, argument: str) -> None:
        """Refuse to record a move after which a rank holds no shards: it would not take part in
        the way back, for which the others would wait."""
        lost = sorted(set(self.group.ranks) - set(self.after.owners))
        if lost:
            raise ShardedTensorError(
                f"{argument}: gradients of what was recorded have to move back, and ranks {lost} "
                "hold no shards after this move, so they would not know when; give each an empty "
                "shard, or detach() first"
            )


class _Same(torch.autograd.Function):
    """What is the same on every rank, of which each goes on with a part. Backward: the sum."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return _Sum.apply(gradients[0], ctx.group), None  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    """The sum of what the ranks have. Backward: the gradient, which is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return group.communicator.all_reduce(tensor.contiguous(), "sum")

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return same(gradients[0], ctx.group), None


def same(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """A tensor that is the same on every rank; its gradient, to which each rank adds its part, is
    too. All ranks take part in the way back."""
    return _Same.apply(tensor, group)  # type: ignore[no-any-return, no-untyped-call]


class _Moved(torch.autograd.Function):
    """Shards moved; the gradients move back. The first result is what a rank without shards has."""

    @staticmethod
    def forward(
        ctx: Any, move: Move, like: torch.Tensor, nothing: torch.Tensor, *shards: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.move, ctx.like, ctx.shape = move, like, nothing.shape
        kept = {shard.untyped_storage().data_ptr() for shard in shards}
        results = [
            each.clone() if each.untyped_storage().data_ptr() in kept else each
            for each in move.run(shards, like)
        ]
        return torch.empty_like(nothing), *results

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor, *gradients: torch.Tensor) -> tuple[Any, ...]:
        # By the same function, so that it can be differentiated again.
        nothing = ctx.like.new_empty(ctx.shape).requires_grad_(torch.is_grad_enabled())
        return None, None, *_Moved.apply(ctx.move.reverse, ctx.like, nothing, *gradients)  # type: ignore[no-untyped-call]


def moved(
    move: Move, tensors: Sequence[torch.Tensor], like: torch.Tensor, nothing: torch.Tensor | None
) -> list[torch.Tensor]:
    """This rank's shards after a move.

    Arguments:
        nothing: by which a rank that holds none takes part in the backward move; None if the move
            is not recorded. All ranks must say the same, and must hold shards after it, if empty
            ones: a rank takes part in the backward move by what its loss is made of.
    """
    if nothing is None:
        return move.run(tensors, like)
    return list(_Moved.apply(move, like, nothing, *tensors))[1:]  # type: ignore[no-untyped-call]


def _flat(tensors: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Shards one after the other; as it lies, if it is one."""
    if len(tensors) == 1:
        return tensors[0].detach().reshape(-1)
    return torch.cat([like.new_empty(0), *(each.detach().reshape(-1) for each in tensors)])


class _Whole(torch.autograd.Function):
    """All shards on every rank. Backward: a rank's own part of the gradient, which is the same on
    all ranks; nothing travels. By `nothing`, a rank that holds none is a part of the graph too."""

    @staticmethod
    def forward(
        ctx: Any,
        held: Held,
        group: Group,
        out: torch.Tensor,
        nothing: torch.Tensor,
        *shards: torch.Tensor,
    ) -> torch.Tensor:
        ctx.boxes, ctx.group = held.by(group.rank), group
        with running("ShardedTensor.full_tensor"):
            gathered = group.communicator.all_gather(_flat(shards, out), 0, held.counts(group))
        boxes = [box for rank in group.ranks for box in held.by(rank)]
        parts = gathered.split_with_sizes([math.prod(box.shape) for box in boxes])
        for box, part in zip(boxes, parts, strict=True):
            out[box.slices] = part.view(box.shape)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        whole = same(gradients[0], ctx.group)
        pieces = (whole[box.slices].contiguous() for box in ctx.boxes)
        return None, None, None, whole.reshape(-1)[:0], *pieces


def whole(
    held: Held,
    group: Group,
    tensors: Sequence[torch.Tensor],
    out: torch.Tensor,
    nothing: torch.Tensor,
) -> torch.Tensor:
    """All shards as one tensor, on every rank; differentiable. `out` is written to.

    Arguments:
        nothing: that is recorded as the shards are, on all ranks.
    """
    return _Whole.apply(held, group, out, nothing, *tensors)  # type: ignore[no-any-return, no-untyped-call]
