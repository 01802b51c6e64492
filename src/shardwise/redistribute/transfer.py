"""Transfers: which boxes of a tensor each pair of ranks exchanges, and how they are sent.

Every rank computes its own sends and receives from the two layouts alone, in time proportional to
the number of its peers. Sender and receiver apply the same rule, so every send has its receive.

Three parts. *Exchange*: the transfers of a move without pending reductions (`sends`, `receives`).
*Ownership*: the transfers of a move that also reduces. *Swap*: sending and receiving the boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple

import torch

from shardwise.comm import Communicator, Pending
from shardwise.core.box import Box, chunk
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh

Coordinate = tuple[int, ...]


class Transfer(NamedTuple):
    """A box of the global tensor that travels to or from `rank`."""

    rank: int
    box: Box


@lru_cache(maxsize=4096)
def split_axes(layout: Layout) -> frozenset[int]:
    """Return the axes that split some dim."""
    return frozenset(axis for axes in layout.shard_order for axis in axes)


def unsplit_axes(layout: Layout) -> list[int]:
    """Return the axes that split no dim."""
    split = split_axes(layout)
    return [axis for axis in range(layout.mesh.ndim) if axis not in split]


# ---- exchange
#
# The shards of a layout tile the tensor; each tile is held by one rank or several. A rank needs the
# tiles that overlap its new box, except its own. Within one mesh it receives each tile from the
# holder with the same places on the axes that do not split the source: that spreads the sending
# evenly over the holders. Between two meshes the holders take turns by the position of the
# receiver.


def receives(source: Layout, target: Layout, rank: int) -> list[Transfer]:
    """Return the boxes that `rank` receives, including the box it keeps, if any."""
    place = target.mesh.coordinate_of(rank)
    if place is None:
        return []
    need = target.box(place)
    if source.mesh is target.mesh:
        fixed = _unsplit_places(source, place)
        return [
            Transfer(source.mesh.rank_at(holder), part)
            for holder, part in _holders(source, need, fixed)
        ]
    first_holder = dict.fromkeys(unsplit_axes(source), 0)
    return [
        Transfer(_holder_for(source, tile, target.mesh, rank), part)
        for tile, part in _holders(source, need, first_holder)
    ]


def sends(source: Layout, target: Layout, rank: int) -> list[Transfer]:
    """Return the boxes that `rank` sends, including the box it keeps, if any."""
    place = source.mesh.coordinate_of(rank)
    if place is None:
        return []
    own = source.box(place)
    if source.mesh is target.mesh:
        fixed = _unsplit_places(source, place)
        return [
            Transfer(target.mesh.rank_at(taker), part)
            for taker, part in _holders(target, own, fixed)
        ]
    takers = [
        Transfer(target.mesh.rank_at(taker), part) for taker, part in _holders(target, own, {})
    ]
    return [
        taker for taker in takers if _holder_for(source, place, target.mesh, taker.rank) == rank
    ]


def _holders(
    layout: Layout, box: Box, fixed: Mapping[int, int]
) -> Iterator[tuple[Coordinate, Box]]:
    """Yield every coordinate with the `fixed` places whose shard overlaps `box`, and the
    overlap."""
    mesh = layout.mesh.shape
    split = [
        _overlapping(size, axes, mesh, low, high, fixed)
        for size, axes, low, high in zip(
            layout.shape, layout.shard_order, box.start, box.stop, strict=True
        )
    ]
    loose = [axis for axis in unsplit_axes(layout) if axis not in fixed]
    for parts in product(*split):
        place = [fixed.get(axis, 0) for axis in range(len(mesh))]
        for places, _, _ in parts:
            for axis, index in places:
                place[axis] = index
        common = Box(tuple(part[1] for part in parts), tuple(part[2] for part in parts))
        for indices in product(*(range(mesh[axis]) for axis in loose)):
            for axis, index in zip(loose, indices, strict=True):
                place[axis] = index
            yield tuple(place), common


def _unsplit_places(layout: Layout, place: Coordinate) -> dict[int, int]:
    """Return the places of a coordinate on the axes that split no dim."""
    return {axis: place[axis] for axis in unsplit_axes(layout)}


_AxisPlaces = tuple[tuple[int, int], ...]
"""Pairs of an axis and a place on it."""


def _overlapping(
    size: int,
    axes: tuple[int, ...],
    mesh: tuple[int, ...],
    low: int,
    high: int,
    fixed: Mapping[int, int],
) -> list[tuple[_AxisPlaces, int, int]]:
    """Return the chunks of one dim that overlap `[low, high)`: their places, and the overlap."""
    found: list[tuple[_AxisPlaces, int, int]] = [((), 0, size)] if low < high else []
    for axis in axes:
        deeper = []
        for places, start, stop in found:
            step = -((start - stop) // mesh[axis])
            first = max(0, (low - start) // step)
            last = min(mesh[axis] - 1, (min(high, stop) - 1 - start) // step)
            if axis in fixed:
                first, last = max(first, fixed[axis]), min(last, fixed[axis])
            for index in range(first, last + 1):
                bounds = chunk(start, stop, mesh[axis], index)
                deeper.append(((*places, (axis, index)), *bounds))
        found = deeper
    overlaps = ((places, max(start, low), min(stop, high)) for places, start, stop in found)
    return [each for each in overlaps if each[1] < each[2]]


def _holder_for(source: Layout, tile: Coordinate, target: DeviceMesh, taker: int) -> int:
    """Return the rank that gives the tile at `tile` to `taker`, which is in the other mesh."""
    mesh = source.mesh
    unsplit = unsplit_axes(source)
    own = mesh.coordinate_of(taker)
    if own is not None and all(
        own[axis] == tile[axis] for axis in range(mesh.ndim) if axis not in unsplit
    ):
        return taker
    place = target.coordinate_of(taker)
    assert place is not None, "the taker is in the target mesh"
    turn = 0
    for index, size in zip(place, target.shape, strict=True):
        turn = turn * size + index
    turn %= math.prod(mesh.shape[axis] for axis in unsplit)
    holder = list(tile)
    for axis in reversed(unsplit):
        turn, holder[axis] = divmod(turn, mesh.shape[axis])
    return mesh.rank_at(holder)


# ---- ownership
#
# A tensor has contributions along some axes and moves to a target layout. In the first round every
# element is reduced by one rank that needs it, its *owner*: the contributions travel straight to
# it. In the second round owners send what they reduced to the other ranks that need it. An element
# with p contributions that r ranks need then travels (p - 1) + (r - 1) times, which is the minimum,
# plus once more if none of those ranks holds a contribution.
#
# Among the ranks that need an element, those that hold a contribution to it share the ownership; if
# none does, all share. Sharing cuts the overlap of the two shards along its longest dim.
#
# If the target is itself pending a sum along new axes, one rank along them is enough for each
# element: ranks along those axes share, the owner keeps, and the others hold zeros.


class Roles:
    """The axes of a reduce-exchange, by their part in it."""

    def __init__(self, source: Layout, target: Layout) -> None:
        pending, wanted = dict(source.partial), dict(target.partial)
        split = split_axes(source)
        self.ending = [axis for axis in pending if axis not in wanted]
        """Reduced over."""
        self.new = [axis for axis in wanted if axis not in pending]
        """Newly pending in the target: one rank along them is enough for each element."""
        whole = set(range(source.mesh.ndim)) - split_axes(target) - set(wanted)
        # Without contributions to add up, a rank that has a copy needs no other rank.
        self.replicas = sorted(whole) if self.ending else []
        """Ranks along these need the same elements: they share the work, then swap."""
        self.able = {*self.replicas, *self.new}
        """Ranks along these can own an element that some rank needs."""
        self.sharing = sorted(self.able - split)
        """Of those, the axes along which ranks hold a contribution."""
        self.fixed = split - self.able
        """Split in the source, and at the same place for all ranks that can own an element."""
        self.split = split


class Ownership:
    """Both rounds of a reduce-exchange, seen by the rank at `place`."""

    def __init__(self, source: Layout, target: Layout, place: Coordinate) -> None:
        self.source, self.target, self.place = source, target, place
        self.roles = Roles(source, target)

    def sends(self) -> list[Transfer]:
        """Return the contributions this rank sends in the first round, itself included."""
        place, mesh = self.place, self.source.mesh
        fixed = _unsplit_places(self.source, place)
        fixed = {axis: index for axis, index in fixed.items() if axis not in self.roles.ending}
        result = []
        for owner, common in _holders(self.target, self.source.box(place), fixed):
            part = self._part(place, common, owner)
            if part is not None:
                result.append(Transfer(mesh.rank_at(owner), part))
        return result

    def receives(self) -> list[Transfer]:
        """Return the contributions this rank receives in the first round, itself included."""
        result = []
        for tile, part in self._owned_by(self.place):
            fixed = {
                axis: index for axis, index in enumerate(tile) if axis not in self.roles.ending
            }
            result += [
                Transfer(self.source.mesh.rank_at(giver), part)
                for giver, _ in _holders(self.source, part, fixed)
            ]
        return result

    def owned(self, place: Coordinate) -> list[Box]:
        """Return the boxes the rank at `place` has reduced and sends in the second round."""
        return [part for _, part in self._owned_by(place)]

    @cached_property
    def replicas(self) -> list[Coordinate]:
        """The ranks this rank swaps with in the second round, itself included."""
        found = [self.place]
        for axis in self.roles.replicas:
            places = range(self.source.mesh.shape[axis])
            found = [(*p[:axis], index, *p[axis + 1 :]) for p in found for index in places]
        return found

    def _owned_by(self, place: Coordinate) -> list[tuple[Coordinate, Box]]:
        """Return tiles of the source, each with the part of it that the rank at `place` owns."""
        fixed = _unsplit_places(self.source, place)
        found = []
        for tile, common in _holders(self.source, self.target.box(place), fixed):
            part = self._part(tile, common, place)
            if part is not None:
                found.append((tile, part))
        return found

    def _part(self, tile: Coordinate, common: Box, owner: Coordinate) -> Box | None:
        """Return the part of `common`, the overlap of a tile and the owner's new box, that
        `owner` reduces."""
        roles = self.roles
        shared_by = sorted(roles.able)
        if all(tile[axis] == owner[axis] for axis in roles.fixed):
            if any(tile[axis] != owner[axis] for axis in roles.split):
                return None  # another rank that needs it holds a contribution
            shared_by = roles.sharing
        index, count = 0, 1
        for axis in shared_by:
            size = self.source.mesh.shape[axis]
            index, count = index * size + owner[axis], count * size
        return _chunk_of_box(common, count, index)


def _chunk_of_box(box: Box, count: int, index: int) -> Box | None:
    """Return one of `count` chunks of a box, cut along its longest dim; None if it is empty."""
    if count == 1:
        return box
    if not box.shape:
        return box if index == 0 else None
    dim = max(range(len(box.shape)), key=lambda dim: box.shape[dim])
    first, last = chunk(box.start[dim], box.stop[dim], count, index)
    if first == last:
        return None
    start, stop = list(box.start), list(box.stop)
    start[dim], stop[dim] = first, last
    return Box(tuple(start), tuple(stop))


# ---- swap

Parts = list[tuple[Box, torch.Tensor]]
"""Parts of a tensor, each with its box in the global tensor."""


@dataclass(frozen=True, slots=True)
class Swap:
    """The transfers of one rank; those to itself are not sent."""

    group: Communicator
    rank: int
    given: list[Transfer]
    taken: list[Transfer]

    def of_slices(self, local: torch.Tensor, frame: Box | None) -> Pending[Parts]:
        """Send slices of `local`, the shard in `frame`, and receive parts, packed into one
        all-to-all."""
        parts = {}
        for transfer in self.given:
            assert frame is not None, "a rank without a piece sends nothing"
            parts[transfer.box] = local[transfer.box.within(frame).slices]
        return self.of_boxes(parts, local)

    def of_boxes(self, parts: dict[Box, torch.Tensor], like: torch.Tensor) -> Pending[Parts]:
        """Send parts to peers and receive theirs, of the dtype and device of `like`."""
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
                iter(_split_up(boxes, piece))
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
        """Send slices of `local`, the shard in `before`, straight into slices of the result, the
        shard in `after`."""
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
        """Send parts from any memory into `places`, as messages. Two ranks that exchange one box
        pack nothing."""
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
            peer: places[boxes[0]] if len(boxes) == 1 else _buffer_for(boxes, places[boxes[0]])
            for peer, boxes in incoming.items()
        }
        sends = {peer: _joined(each) for peer, each in outgoing.items()}

        def finish(_: None) -> None:
            for peer, boxes in incoming.items():
                if len(boxes) > 1:
                    for box, part in zip(boxes, _split_up(boxes, receives[peer]), strict=True):
                        places[box].copy_(part)

        return self.group.exchange_async(sends, receives).then(finish)

    def _index(self) -> dict[int, int]:
        return {peer: at for at, peer in enumerate(self.group.ranks)}


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat([piece.reshape(-1) for piece in pieces])


def _buffer_for(boxes: list[Box], like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(sum(math.prod(box.shape) for box in boxes))


def _split_up(boxes: list[Box], piece: torch.Tensor) -> list[torch.Tensor]:
    if len(boxes) <= 1:
        return [piece]
    parts = piece.split_with_sizes([math.prod(box.shape) for box in boxes])
    return [part.view(box.shape) for box, part in zip(boxes, parts, strict=True)]


def assemble(frame: Box, parts: Parts, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor in `frame` made of its parts; without a copy if one part is all of it."""
    if len(parts) == 1 and parts[0][0] == frame:
        return parts[0][1]
    result = like.new_empty(frame.shape)
    for box, part in parts:
        result[box.within(frame).slices] = part
    return result
