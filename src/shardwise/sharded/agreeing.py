"""Do all ranks say the same? What one of them objects to is refused on all: nobody waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardwise import errors
from shardwise.errors import ShardwiseError
from shardwise.sharded.errors import ShardedStateError, ShardedTensorError
from shardwise.sharded.group import Group


@dataclass(frozen=True)
class Problem:
    """What a rank found wrong with its own arguments, to be raised on all."""

    kind: type[ShardwiseError]
    text: str

    @staticmethod
    def of(error: Exception) -> Problem:
        """An error, without the rank that its message ends with; another's as one of ours."""
        if isinstance(error, ShardwiseError):
            return Problem(type(error), str(error).removesuffix(f" [{errors.whereabouts()}]"))
        kind = ShardedTensorError if isinstance(error, ValueError) else ShardedStateError
        return Problem(kind, f"{type(error).__name__}: {error}")


def refuse_problems(group: Group, problems: list[Problem | None]) -> None:
    """Raise what any rank found wrong with its arguments, on all ranks."""
    for rank, problem in zip(group.ranks, problems, strict=True):
        if problem is not None:
            everybody = all(each == problem for each in problems)
            raise problem.kind(problem.text if everybody else f"rank {rank}: {problem.text}")


def check_agreement(group: Group, everywhere: list[dict[str, Any]]) -> None:
    """Refuse arguments that are not the same on all ranks.

    Arguments:
        everywhere: what each rank has, by name.
    """
    for rank, theirs in zip(group.ranks, everywhere, strict=True):
        for name, first in everywhere[0].items():
            if theirs.get(name, first) != first:
                raise ShardedTensorError(
                    f"{name}: expected the same on every rank; rank {group.ranks[0]} has "
                    f"{first}, rank {rank} has {theirs[name]}"
                )


@contextmanager
def objections(*groups: Group) -> Iterator[None]:
    """What is checked inside; an error of one rank is raised on all ranks of the groups."""
    try:
        yield
    except Exception as error:
        _tell(groups, Problem.of(error))
        raise
    _tell(groups, None)


def _tell(groups: Sequence[Group], problem: Problem | None) -> None:
    told = [(group, group.communicator.gather_objects(problem)) for group in groups]
    for group, problems in told:
        refuse_problems(group, problems)
