"""Boxes of a tensor change hands: what a rank gives to its peers and takes from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from shardwise.box import Box
from shardwise.comm import Communicator, Pending
from shardwise.redistribute.overlap import Transfer

Parts = list[tuple[Box, torch.Tensor]]
"""Parts of a tensor, each with where it belongs in the global one."""


@dataclass(frozen=True, slots=True)
class Swap:
    """What this rank gives and takes; what it gives to itself is not sent."""

    group: Communicator
    rank: int
    given: list[Transfer]
    taken: list[Transfer]

    def of_slices(self, local: torch.Tensor, frame: Box | None) -> Pending[Parts]:
        """Send parts of `local`, which lies in `frame`, and get others: at most one for each
        peer."""
        parts = {}
        for transfer in self.given:
            assert frame is not None, "a rank without a piece gives nothing"
            parts[transfer.box] = local[transfer.box.within(frame).slices]
        return self.of_boxes(parts, local)

    def of_boxes(self, parts: dict[Box, torch.Tensor], like: torch.Tensor) -> Pending[Parts]:
        """Send parts to peers and get theirs, of the dtype and device of `like`."""
        index = self._index()
        outgoing: list[list[torch.Tensor]] = [[] for _ in index]
        incoming: list[list[Box]] = [[] for _ in index]
        for peer, box in self.given:
            if peer != self.rank:
                outgoing[index[peer]].append(parts[box])
        for peer, box in self.taken:
            if peer != self.rank:
                incoming[index[peer]].append(box)
        nothing = like.new_empty(0)
        pieces = [_joined(each) if each else nothing for each in outgoing]
        shapes = [
            each[0].shape if len(each) == 1 else (sum(math.prod(box.shape) for box in each),)
            for each in incoming
        ]
        pending = self.group.all_to_all_async(pieces, shapes)

        def finish(received: list[torch.Tensor]) -> Parts:
            arrived = [
                iter(_taken_apart(boxes, piece))
                for boxes, piece in zip(incoming, received, strict=True)
            ]
            return [
                (box, parts[box] if peer == self.rank else next(arrived[index[peer]]))
                for peer, box in self.taken
            ]

        return pending.then(finish)

    def in_place(
        self, local: torch.Tensor, before: Box | None, after: Box | None
    ) -> Pending[torch.Tensor]:
        """From slices of `local`, which lies in `before`, into slices of the result, which lies in
        `after`."""
        result = local.new_empty(0 if after is None else after.shape)
        parts = {
            box: local[box.within(before).slices] for _, box in self.given if before is not None
        }
        places = {
            box: result[box.within(after).slices] for _, box in self.taken if after is not None
        }
        return self.into(parts, places).then(lambda _: result)

    def into(
        self, parts: dict[Box, torch.Tensor], places: dict[Box, torch.Tensor]
    ) -> Pending[None]:
        """From parts that lie anywhere to where they belong: nothing is packed if two ranks
        exchange but one."""
        index = self._index()
        outgoing: dict[int, list[torch.Tensor]] = {}
        for peer, box in self.given:
            if peer == self.rank:
                places[box].copy_(parts[box])
            else:
                outgoing.setdefault(index[peer], []).append(parts[box])
        incoming: dict[int, list[Box]] = {}
        for peer, box in self.taken:
            if peer != self.rank:
                incoming.setdefault(index[peer], []).append(box)
        receives = {
            peer: places[boxes[0]] if len(boxes) == 1 else _room(boxes, places[boxes[0]])
            for peer, boxes in incoming.items()
        }
        sends = {peer: _joined(each) for peer, each in outgoing.items()}

        def finish(_: None) -> None:
            for peer, boxes in incoming.items():
                if len(boxes) > 1:
                    for box, part in zip(boxes, _taken_apart(boxes, receives[peer]), strict=True):
                        places[box].copy_(part)

        return self.group.exchange_async(sends, receives).then(finish)

    def _index(self) -> dict[int, int]:
        return {peer: at for at, peer in enumerate(self.group.ranks)}


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat([piece.reshape(-1) for piece in pieces])


def _room(boxes: list[Box], like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(sum(math.prod(box.shape) for box in boxes))


def _taken_apart(boxes: list[Box], piece: torch.Tensor) -> list[torch.Tensor]:
    if len(boxes) <= 1:
        return [piece]
    parts = piece.split_with_sizes([math.prod(box.shape) for box in boxes])
    return [part.view(box.shape) for box, part in zip(boxes, parts, strict=True)]


def assembled(frame: Box, parts: Parts, like: torch.Tensor) -> torch.Tensor:
    """The tensor that lies in `frame`, made of its parts; no copy if there is but one."""
    if len(parts) == 1 and parts[0][0] == frame:
        return parts[0][1]
    result = like.new_empty(frame.shape)
    for box, part in parts:
        result[box.within(frame).slices] = part
    return result
