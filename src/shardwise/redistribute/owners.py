"""Reduce and move at once: who adds up what, and for whom.

A tensor has contributions along some axes and is to lie in a target layout. In the first round
every element is reduced by one rank that needs it, its *owner*: the contributions travel straight
there. In the second round owners give what they reduced to the other ranks that need it. An element
with p contributions that r ranks need then travels (p - 1) + (r - 1) times, which nobody can
undercut, plus once more if none of those ranks holds a contribution.

Among the ranks that need an element, those that hold a contribution to it share the ownership; if
none does, all share. Sharing cuts the overlap of the two shards along its longest dim.

If the target is itself pending a sum along new axes, one rank along them is enough for each
element: ranks along those axes share, the owner keeps, and the others hold zeros there.
"""

from __future__ import annotations

from functools import cached_property

from shardwise.box import Box, chunk
from shardwise.layout import Layout
from shardwise.redistribute.measure import split_axes
from shardwise.redistribute.overlap import Coordinate, Transfer, holders, unsplit_places


class Roles:
    """The axes of a reduce-exchange by the part they play."""

    def __init__(self, source: Layout, target: Layout) -> None:
        pending, wanted = dict(source.partial), dict(target.partial)
        split = split_axes(source)
        self.ending = [axis for axis in pending if axis not in wanted]
        """Reduced over."""
        self.new = [axis for axis in wanted if axis not in pending]
        """Newly pending in the target: one rank along them is enough for each element."""
        whole = set(range(source.mesh.ndim)) - split_axes(target) - set(wanted)
        # Without contributions to add up, whoever has a copy needs nobody else.
        self.replicas = sorted(whole) if self.ending else []
        """Along these the ranks that need the same share the work, then swap."""
        self.able = {*self.replicas, *self.new}
        """Along these lie the ranks that can own an element some rank needs."""
        self.sharing = sorted(self.able - split)
        """Along these lie those of them that hold a contribution."""
        self.fixed = split - self.able
        """Split in the source, and the same for all that can own an element."""
        self.split = split


class Ownership:
    """Both rounds of a reduce-exchange, seen by the rank at `place`."""

    def __init__(self, source: Layout, target: Layout, place: Coordinate) -> None:
        self.source, self.target, self.place = source, target, place
        self.roles = Roles(source, target)

    def sends(self) -> list[Transfer]:
        """First round: the contributions this rank gives, itself included."""
        place, mesh = self.place, self.source.mesh
        fixed = unsplit_places(self.source, place)
        fixed = {axis: index for axis, index in fixed.items() if axis not in self.roles.ending}
        result = []
        for owner, common in holders(self.target, self.source.box(place), fixed):
            part = self._part(place, common, owner)
            if part is not None:
                result.append(Transfer(mesh.rank_at(owner), part))
        return result

    def receives(self) -> list[Transfer]:
        """First round: the contributions this rank gets, itself included."""
        result = []
        for tile, part in self._owned_by(self.place):
            fixed = {
                axis: index for axis, index in enumerate(tile) if axis not in self.roles.ending
            }
            result += [
                Transfer(self.source.mesh.rank_at(giver), part)
                for giver, _ in holders(self.source, part, fixed)
            ]
        return result

    def owned(self, place: Coordinate) -> list[Box]:
        """Second round: what the rank at `place` has reduced, and gives to its replicas."""
        return [part for _, part in self._owned_by(place)]

    @cached_property
    def replicas(self) -> list[Coordinate]:
        """The ranks this one swaps with in the second round, itself included."""
        found = [self.place]
        for axis in self.roles.replicas:
            places = range(self.source.mesh.shape[axis])
            found = [(*p[:axis], index, *p[axis + 1 :]) for p in found for index in places]
        return found

    def _owned_by(self, place: Coordinate) -> list[tuple[Coordinate, Box]]:
        """The tiles of the source, with the part of each that the rank at `place` owns."""
        fixed = unsplit_places(self.source, place)
        found = []
        for tile, common in holders(self.source, self.target.box(place), fixed):
            part = self._part(tile, common, place)
            if part is not None:
                found.append((tile, part))
        return found

    def _part(self, tile: Coordinate, common: Box, owner: Coordinate) -> Box | None:
        """The part of `common`, the overlap of a tile and the owner's new box, that it owns."""
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
        return _cut(common, count, index)


def _cut(box: Box, count: int, index: int) -> Box | None:
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
