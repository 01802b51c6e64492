"""Transfers of elements between ranks: from shards to other shards, to one rank, to all, from one.

Two ranks exchange at most one message, and an element goes only to ranks that need it and do not
hold it: no transfer moves fewer bytes. What each rank sends and receives (its route) follows from
the boxes and their owners, which every rank knows.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from shardwise.comm import is_large
from shardwise.comm.trace import operator_scope
from shardwise.core.box import Box
from shardwise.core.errors import ShardedTensorError
from shardwise.redistribute.transfer import Swap, Transfer
from shardwise.sharded.group import RankGroup, ShardOwnership
from shardwise.sharded.metadata import BoxIndex

# ---- routes: plain data, without tensors or process groups

_MOST_CACHED = 256
"""Routes between more boxes than this are computed anew each time, as they take memory."""


class ShardSlice(NamedTuple):
    """A part of a shard of this rank."""

    at: int
    """The position of the shard among those of this rank."""
    slices: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """What one rank sends, receives and keeps in a move from some shards to others."""

    sent: list[Transfer]
    received: list[Transfer]
    """Sender and receiver of a message list its boxes in the same order."""
    sources: dict[Box, ShardSlice]
    """The part of a shard before the move that each sent box is read from."""
    targets: dict[Box, ShardSlice]
    """The part of a shard after the move that each received box is written to."""
    shapes: list[tuple[int, ...]]
    """The shapes of this rank's shards after the move."""
    kept: dict[int, int]
    """The positions after the move of shards that do not change, with their positions before it."""
    count: int
    """The number of elements of the whole tensor."""
    is_sparse: bool
    """Whether there are no more messages than ranks. Always False for many boxes, where counting
    would take long. The same on all ranks."""


def find_route(
    before: ShardOwnership, after: ShardOwnership, ranks: tuple[int, ...], rank: int, may_keep: bool
) -> Route:
    """Return the route of `rank`, one of `ranks`, from the shards before to those after.

    Arguments:
        may_keep: whether a shard that does not change can stay in its memory.
    """
    is_cached = len(before.boxes) + len(after.boxes) <= _MOST_CACHED
    return (_cached_route if is_cached else _compute_route)(before, after, ranks, rank, may_keep)


def _compute_route(
    before: ShardOwnership, after: ShardOwnership, ranks: tuple[int, ...], rank: int, may_keep: bool
) -> Route:
    own_before, own_after = before.boxes_of(rank), after.boxes_of(rank)
    positions = {box: at for at, box in enumerate(own_before) if may_keep and not box.is_empty}
    kept = {at: positions[box] for at, box in enumerate(own_after) if box in positions}
    sent, sources = _overlaps_by_owner(own_before, set(kept.values()), after)
    received, targets = _overlaps_by_owner(own_after, kept.keys(), before)
    is_small = len(before.boxes) + len(after.boxes) <= _MOST_CACHED
    return Route(
        sorted(sent),
        sorted(received),
        sources,
        targets,
        [box.shape for box in own_after],
        kept,
        sum(math.prod(box.shape) for box in before.boxes),
        is_small and _has_few_messages(before, after, len(ranks)),
    )


_cached_route = lru_cache(maxsize=1024)(_compute_route)


def _overlaps_by_owner(
    boxes: Sequence[Box], skipped: Container[int], ownership: ShardOwnership
) -> tuple[list[Transfer], dict[Box, ShardSlice]]:
    """Return the overlaps of own boxes with the boxes of an ownership, and who owns those.

    Arguments:
        skipped: the positions of own boxes to leave out.
    """
    index = BoxIndex(ownership.boxes)
    transfers, slices = [], {}
    for at, box in enumerate(boxes):
        for other in index.overlapping(box) if at not in skipped else ():
            common = box.intersect(ownership.boxes[other])
            transfers.append(Transfer(ownership.owners[other], common))
            slices[common] = ShardSlice(at, common.within(box).slices)
    return transfers, slices


def _has_few_messages(before: ShardOwnership, after: ShardOwnership, limit: int) -> bool:
    """Return whether at most `limit` pairs of different ranks exchange elements."""
    index, pairs = BoxIndex(after.boxes), set()
    for box, owner in zip(before.boxes, before.owners, strict=True):
        receivers = {after.owners[at] for at in index.overlapping(box)}
        pairs |= {(owner, receiver) for receiver in receivers if receiver != owner}
        if len(pairs) > limit:
            return False
    return True


# ---- moves


@dataclass(frozen=True, slots=True)
class ShardMove:
    """A move from some shards to others of the same tensor."""

    group: RankGroup
    before: ShardOwnership
    after: ShardOwnership
    reason: str = "ShardedTensor.reshard"
    """The cause of the communication, as a trace shows it."""

    @property
    def reverse(self) -> ShardMove:
        """The move back, which gradients take."""
        return ShardMove(self.group, self.after, self.before, self.reason)

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        like: torch.Tensor,
        into: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Return this rank's shards after the move; not recorded by autograd.

        Arguments:
            tensors: this rank's shards before the move.
            like: has the dtype and the device of the shards, which a rank may have none of.
            into: tensors to write the results to. By default they are new tensors, or one of
                `tensors` where a shard does not change.
        """
        group = self.group
        group.check_inside()
        route = find_route(self.before, self.after, group.ranks, group.rank, into is None)
        local = [each.detach() for each in tensors]
        if into is None:
            kept = route.kept
            results = [
                local[kept[at]] if at in kept else like.new_empty(shape)
                for at, shape in enumerate(route.shapes)
            ]
        else:
            results = list(into)
        sources = {box: local[at][slices] for box, (at, slices) in route.sources.items()}
        targets = {box: results[at][slices] for box, (at, slices) in route.targets.items()}
        swap = Swap(group.communicator, group.rank, route.sent, route.received)
        with operator_scope(self.reason):
            # Few messages start faster than an all-to-all, and long ones need no packing. All
            # ranks decide alike.
            if route.is_sparse or is_large(route.count * like.itemsize // len(group.ranks)):
                swap.into(sources, targets).wait()
            else:
                for box, part in swap.of_boxes(sources, like).wait():
                    targets[box].copy_(part)
        return results

    def check_gradients_return(self, argument: str) -> None:
        """Refuse to record a move after which a rank holds no shards: that rank would not take part
        in the backward move, and the others would deadlock."""
        without = sorted(set(self.group.ranks) - set(self.after.owners))
        if without:
            raise ShardedTensorError(
                f"{argument}: gradients have to move back through this move, and ranks {without} "
                "hold no shards after it, so they would not take part; give each an empty shard, "
                "or detach() first"
            )


class _MoveShards(torch.autograd.Function):
    """Forward: move shards. Backward: move the gradients back.

    The first result is a placeholder, by which a rank without shards takes part in the backward.
    """

    @staticmethod
    def forward(
        ctx: Any, move: ShardMove, like: torch.Tensor, placeholder: torch.Tensor, *shards: Any
    ) -> tuple[torch.Tensor, ...]:
        ctx.move, ctx.like, ctx.shape = move, like, placeholder.shape
        inputs = {shard.untyped_storage().data_ptr() for shard in shards}
        results = [
            each.clone() if each.untyped_storage().data_ptr() in inputs else each
            for each in move.run(shards, like)
        ]
        return torch.empty_like(placeholder), *results

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor, *gradients: torch.Tensor) -> tuple[Any, ...]:
        # By the same function, so that it can be differentiated again.
        placeholder = ctx.like.new_empty(ctx.shape).requires_grad_(torch.is_grad_enabled())
        return None, None, *_MoveShards.apply(ctx.move.reverse, ctx.like, placeholder, *gradients)  # type: ignore[no-untyped-call]


def move_shards(
    move: ShardMove,
    tensors: Sequence[torch.Tensor],
    like: torch.Tensor,
    placeholder: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Return this rank's shards after a move. Backward: the gradients move back.

    Arguments:
        placeholder: lets a rank without shards take part in the backward move; None if the move is
            not recorded. If it is, that is so on all ranks, and each must hold a shard after the
            move, perhaps an empty one: a rank takes part in the backward move only if its loss
            depends on a result.
    """
    if placeholder is None:
        return move.run(tensors, like)
    return list(_MoveShards.apply(move, like, placeholder, *tensors))[1:]  # type: ignore[no-untyped-call]


# ---- tensors that every rank has


class _SumGrads(torch.autograd.Function):
    """Forward: the tensor as it is. Backward: the sum of the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: RankGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return _Sum.apply(gradients[0], ctx.group), None  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    """Forward: the sum over the ranks. Backward: the gradient, which is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: RankGroup) -> torch.Tensor:
        ctx.group = group
        return group.communicator.all_reduce(tensor.contiguous(), "sum")

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return sum_grads_over_ranks(gradients[0], ctx.group), None


def sum_grads_over_ranks(tensor: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return a tensor that is the same on every rank and of which each rank uses a part.

    Backward: the sum of the gradients of all ranks. All ranks take part in it.
    """
    return _SumGrads.apply(tensor, group)  # type: ignore[no-any-return, no-untyped-call]


class _GatherShards(torch.autograd.Function):
    """Forward: all shards on every rank, as one tensor. Backward: each rank's own boxes of the
    gradient, which is the same on all ranks; no communication."""

    @staticmethod
    def forward(
        ctx: Any,
        ownership: ShardOwnership,
        group: RankGroup,
        out: torch.Tensor,
        placeholder: torch.Tensor,
        *shards: torch.Tensor,
    ) -> torch.Tensor:
        ctx.boxes, ctx.group = ownership.boxes_of(group.rank), group
        with operator_scope("ShardedTensor.full_tensor"):
            counts = ownership.element_counts(group)
            gathered = group.communicator.all_gather(_flatten(shards, out), 0, counts)
        boxes = [box for rank in group.ranks for box in ownership.boxes_of(rank)]
        parts = gathered.split_with_sizes([math.prod(box.shape) for box in boxes])
        for box, part in zip(boxes, parts, strict=True):
            out[box.slices] = part.view(box.shape)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        whole = sum_grads_over_ranks(gradients[0], ctx.group)
        pieces = (whole[box.slices].contiguous() for box in ctx.boxes)
        return None, None, None, whole.reshape(-1)[:0], *pieces


def gather_shards(
    ownership: ShardOwnership,
    group: RankGroup,
    tensors: Sequence[torch.Tensor],
    out: torch.Tensor,
    placeholder: torch.Tensor,
) -> torch.Tensor:
    """Write all shards to `out` on every rank, and return it.

    Backward: each rank's own part of the gradient, which must be the same on all ranks.

    Arguments:
        tensors: this rank's shards.
        placeholder: requires gradients as the shards do, so that the result does on a rank without
            shards too.
    """
    group.check_inside()
    return _GatherShards.apply(ownership, group, out, placeholder, *tensors)  # type: ignore[no-any-return, no-untyped-call]


def _flatten(tensors: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the elements of shards, one shard after the other; without a copy, if it is one."""
    if len(tensors) == 1:
        return tensors[0].detach().reshape(-1)
    return torch.cat([like.new_empty(0), *(each.detach().reshape(-1) for each in tensors)])
