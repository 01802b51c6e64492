"""Facts that ranks must state alike, compared at their next collective.

A call that is no collective, such as `DTensor.from_local(shape=)`, cannot ask the other ranks
whether they say the same. It states a fact here. At the next collective of these ranks, each rank
compares the facts that it has stated since the last one with those of the others. Simulated ranks
do so where they meet. Real ranks use the store of torch.distributed: the first rank to come leaves
its facts there, and the others read them, in one round trip without waiting for any rank.

So a rank that differs raises before data is mixed, and a program that is right sends no further
collective and can never wait for one. A collective of more ranks compares only those that state
facts about the same group of ranks: other ranks have other tensors. Ranks differ if each has stated
a fact that the other has not; a tensor that one rank makes alone is no error. A fact is compared
only the first few times that it is stated.

Each group and each mesh has counters of its own. So its ranks have equal counts, even if some of
them also take part in other groups.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Collection, Hashable, Iterable
from typing import NamedTuple

from shardwise.comm.trace import user_line
from shardwise.core import world

_MOST_TIMES = 4
"""How often the same fact is compared."""
_MOST_KNOWN = 4096
"""The most facts that a rank counts; then it forgets them and compares again."""
_MOST_PENDING = 256
"""The most facts that wait for a collective; further ones are dropped."""
_MOST_SHOWN = 3
"""The most facts of a rank that an error shows."""


class Fact(NamedTuple):
    """A fact that a rank has stated."""

    text: str
    site: str
    """The line of the user's program."""


Group = frozenset[int]
"""The ranks that must state the same facts."""


class _Stated(threading.local):
    """The facts of one thread: only the order of its own calls is that of its collectives."""

    def __init__(self) -> None:
        self.facts: dict[Group, list[Fact]] = {}
        """The facts that each group has not compared yet."""
        self.world: world.World | None = None
        """The ranks that the facts are of: after another start of torch.distributed, others."""


stated = _Stated()


def is_due(key: Hashable, scope: Hashable) -> bool:
    """Return whether a fact should be stated: it was stated a few times at most.

    Arguments:
        key: the fact.
        scope: the mesh or the group of ranks that state it.
    """
    counts = world.current().facts.setdefault(scope, {})
    if len(counts) > _MOST_KNOWN:
        counts.clear()
    counts[key] = counts.get(key, 0) + 1
    return counts[key] <= _MOST_TIMES


def state(text: str, groups: Iterable[Collection[int]]) -> None:
    """State a fact, for the next collective of each of these groups of ranks to compare."""
    _forget_other_world()
    fact = Fact(text, user_line())
    for ranks in groups:
        if len(ranks) > 1:
            facts = stated.facts.setdefault(frozenset(ranks), [])
            if len(facts) < _MOST_PENDING:
                facts.append(fact)


def take(ranks: Collection[int]) -> dict[Group, list[Fact]]:
    """Return the facts that groups among these ranks compare in the collective that begins."""
    _forget_other_world()
    members = frozenset(ranks)
    return {group: stated.facts.pop(group) for group in list(stated.facts) if group <= members}


def _forget_other_world() -> None:
    here = world.current()
    if stated.world is not here:
        stated.world, stated.facts = here, {}


def as_text(rank: int, facts: Collection[Fact]) -> str:
    """Return the facts of a rank as a text for the others."""
    return json.dumps([rank, sorted((fact.text, fact.site) for fact in facts)])


def difference(one: str, other: str) -> str:
    """Return the error message for the facts of two ranks, given as texts; empty if they are alike.

    The lines that facts were stated at may differ.
    """
    (first, before), (second, after) = json.loads(one), json.loads(other)
    only_before, only_after = _without(before, after), _without(after, before)
    if not only_before or not only_after:
        return ""
    return (
        "ranks of one group say different things about the same tensors, where all must say the "
        f"same:\n{_describe(first, only_before)}{_describe(second, only_after)}"
        "Give the same arguments on all ranks of the mesh. If the calls mean different tensors, "
        "use a mesh of the ranks that have them"
    )


def _without(facts: list[list[str]], others: list[list[str]]) -> list[list[str]]:
    """Return the facts that others do not have, or have less often."""
    theirs = Counter(text for text, _ in others)
    left = []
    for text, site in facts:
        theirs[text] -= 1
        if theirs[text] < 0:
            left.append([text, site])
    return left


def _describe(rank: int, facts: list[list[str]]) -> str:
    lines = [f"  rank {rank}: {text} at {site}\n" for text, site in facts[:_MOST_SHOWN]]
    more = len(facts) - _MOST_SHOWN
    return "".join(lines) + (f"  rank {rank}: and {more} more\n" if more > 0 else "")
