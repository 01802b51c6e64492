"""Calls through which a pending sum flows, although it was already made for another call.

Letting it flow costs nothing now, but leaves a second sum to be made of values that are at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.dispatch.entry import Entry, Path, get, replaced_at
from shardwise.dispatch.reduced import reduced
from shardwise.redistribute.cost import communicates
from shardwise.tensor import DTensor

Plan = Callable[[tuple[Any, ...], dict[str, Any]], Entry]


class FlowEntry(Entry):
    """A call whose result is pending a sum because an input is."""

    __slots__ = ("few", "others", "plan")

    def __init__(self, made: Entry, flowing: list[Path], plan: Plan) -> None:
        super().__init__(
            made.name,
            made.run,
            made.tensors,
            made.moves,
            made.layouts,
            plain=made.plain,
            inplace=made.inplace,
            fresh=made.fresh,
            severed=made.severed,
        )
        self.flowing = tuple(flowing)
        """Where the inputs stand whose pending sums flow through."""
        places = [path[0] for path in flowing if len(path) == 1 and type(path[0]) is int]
        self.few = (places[0], places[-1]) if len(flowing) == len(places) <= 2 else None
        """The first and the last of these, if they are one or two positional arguments: a quick
        way to see that no sum was made."""
        self.plan = plan
        self.others: dict[Any, Entry | None] = {}
        """The same call with made sums in place of pending ones, by how these lie (None for one
        that was not made); None where that gains nothing."""

    def with_sums_made(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result, if sums that are made already leave less pending in it; or None."""
        if self.few is not None:  # most calls: of one or two tensors, of which no sum was made
            first, second = self.few
            if "_reduced" not in args[first].__dict__ and "_reduced" not in args[second].__dict__:
                return None
        found = [reduced(get(args, kwargs, path)) for path in self.flowing]
        key = tuple([None if made is None else made._layout for made in found])
        chosen = self.others.get(key)
        if chosen is None and key in self.others:
            return None
        for path, made in zip(self.flowing, found, strict=True):
            if made is not None:
                args, kwargs = replaced_at(args, kwargs, path, made)
        if chosen is None:
            other = self.plan(args, kwargs) if any(key) else self
            chosen = self.others[key] = other if self._is_worse_than(other) else None
            if chosen is None:
                return None
        result = chosen(args, kwargs)
        # A call that returns its argument (x.to with nothing to do) must return that one.
        return None if any(result is made for made in found) else result

    def _is_worse_than(self, other: Entry) -> bool:
        """Whether the other call leaves less to be reduced, and communicates nothing either."""
        if any(communicates(how.source, how.target) for _, how in other.moves):
            return False
        return _pending(other) < _pending(self)


def _pending(entry: Entry) -> int:
    return sum(len(layout.partial) for layout in entry.layouts)


def flowing_paths(
    layouts: Any, targets: Any, paths: list[Path], tensors: list[torch.Tensor]
) -> list[Path]:
    """Where the DTensors stand that are pending and stay so in a call."""
    return [
        path
        for before, after, path, tensor in zip(layouts, targets, paths, tensors, strict=True)
        if before.partial and after.partial and type(tensor) is DTensor
    ]
