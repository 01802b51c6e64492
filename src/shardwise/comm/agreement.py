"""Facts that ranks must state alike, compared at their next collective.

A call that is no collective, such as `DTensor.from_local(shape=)`, cannot ask the other ranks
whether they say the same. It states a fact here. At the next collective of these ranks, each rank
compares the facts that it has stated since the last one with those of the others. Simulated ranks
do so where they meet. Real ranks use the store of torch.distributed: the first rank to come leaves
its facts there, and the others read them, in one round trip without waiting for any rank.

So a rank that differs raises before data is mixed, and a program that is right sends no further
collective and can never wait for one. A rank that has stated nothing is not compared. A fact is
compared only the first few times that it is stated.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass

from shardwise.comm.trace import user_line
from shardwise.core import world

_MOST_TIMES = 4
"""How often the same fact is compared."""
_MOST_KNOWN = 4096
"""The most facts that a rank counts; then it forgets all and compares again."""
_MOST_PENDING = 256
"""The most facts that wait for a collective; further ones are dropped."""
_MOST_SHOWN = 3
"""The most facts of a rank that an error shows."""


@dataclass(slots=True)
class Fact:
    """A fact that a rank has stated."""

    text: str
    site: str
    """The line of the user's program."""
    groups: list[frozenset[int]]
    """The groups of ranks that have not compared it yet."""


class _Stated(threading.local):
    """The facts of one thread: only the order of its own calls is that of its collectives."""

    def __init__(self) -> None:
        self.facts: list[Fact] = []


stated = _Stated()


def is_due(key: Hashable) -> bool:
    """Return whether a fact should be stated: it was stated a few times at most."""
    counts = world.current().facts
    if len(counts) > _MOST_KNOWN:
        counts.clear()
    counts[key] = counts.get(key, 0) + 1
    return counts[key] <= _MOST_TIMES


def state(text: str, groups: Iterable[Collection[int]]) -> None:
    """State a fact, for the next collective of each of these groups of ranks to compare."""
    others = [frozenset(ranks) for ranks in groups if len(ranks) > 1]
    if others and len(stated.facts) < _MOST_PENDING:
        stated.facts.append(Fact(text, user_line(), others))


def take(ranks: Collection[int]) -> list[Fact]:
    """Return the facts that the members of a group compare in the collective that begins."""
    members = frozenset(ranks)
    found = [fact for fact in stated.facts if any(group <= members for group in fact.groups)]
    for fact in found:
        fact.groups = [group for group in fact.groups if not group <= members]
    stated.facts = [fact for fact in stated.facts if fact.groups]
    return found


def as_text(rank: int, facts: Collection[Fact]) -> str:
    """Return the facts of a rank as a text for the others."""
    return json.dumps([rank, sorted((fact.text, fact.site) for fact in facts)])


def difference(one: str, other: str) -> str:
    """Return the error message for the facts of two ranks, given as texts; empty if they are alike.

    The lines that facts were stated at may differ.
    """
    (first, before), (second, after) = json.loads(one), json.loads(other)
    if [text for text, _ in before] == [text for text, _ in after]:
        return ""
    return (
        "ranks of one group say different things about the same tensors, where all must say the "
        f"same:\n{_describe(first, before, after)}{_describe(second, after, before)}"
        "Give the same arguments on all ranks of the mesh. If the calls mean different tensors, "
        "use a mesh of the ranks that have them"
    )


def _describe(rank: int, facts: list[list[str]], others: list[list[str]]) -> str:
    theirs = [text for text, _ in others]
    differing = [(text, site) for text, site in facts if text not in theirs] or facts
    lines = [f"  rank {rank}: {text} at {site}\n" for text, site in differing[:_MOST_SHOWN]]
    if not lines:
        lines = [f"  rank {rank}: nothing\n"]
    more = len(differing) - _MOST_SHOWN
    return "".join(lines) + (f"  rank {rank}: and {more} more\n" if more > 0 else "")
