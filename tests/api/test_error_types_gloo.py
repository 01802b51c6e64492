"""Where torch raises an error, ours is a ShardwiseError and of torch's type: `except` clauses that
were written for torch go on working. Torch's errors are those of the installed version."""

from __future__ import annotations

import functools

import pytest
from support import bad_calls

import shardwise as sw

BUILTIN = (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError, LookupError)
BUILTIN += (AssertionError, NotImplementedError)
"""The types that a program may catch."""

_UNCHECKED = "torch does not check the argument: its error is about an attribute of a wrong object"
OURS_IS_OTHER: dict[str, str] = {
    "mesh: device is no text": _UNCHECKED,
    "distribute_tensor: no mesh": _UNCHECKED,
    "distribute_tensor: no such negative dim": "torch's says that the dim was not normalized",
    "from_local: no mesh": _UNCHECKED,
    "from_local: too many placements": _UNCHECKED,
    "from_local: constructor with a wrong spec": _UNCHECKED,
    "redistribute: no placement": _UNCHECKED,
    "redistribute: mesh is no mesh": "torch calls it a move to another mesh, which ours can do",
    "tensor: sum of no dim": "an IndexError, as of a plain tensor",
    "factory: no mesh": _UNCHECKED,
    "distribute_module: no mesh": _UNCHECKED,
    "parallelize_module: key is no text": _UNCHECKED,
    "parallelize_module: no mesh": _UNCHECKED,
    "fully_shard: no mesh": _UNCHECKED,
    "ShardedTensor: init from no shards": "a mistake of one rank is an error on all: as a text",
}
"""Calls for which ours is of another type, and why."""

Kinds = dict[str, list[str]]


def both() -> tuple[Kinds, Kinds]:
    """Return the types that the error of each call derives from: torch's errors, and ours."""
    theirs = bad_calls.errors_of(bad_calls.torchs_names())
    ours = bad_calls.errors_of(bad_calls.our_names())
    return _kinds(theirs), _kinds(ours)


def _kinds(errors: dict[str, type[BaseException] | None]) -> Kinds:
    known = (*BUILTIN, sw.ShardwiseError)
    return {
        name: [kind.__name__ for kind in known if error is not None and issubclass(error, kind)]
        for name, error in errors.items()
    }


@pytest.fixture(scope="module")
def measure() -> functools._lru_cache_wrapper[list[tuple[Kinds, Kinds]]]:
    """Return a function that runs the table once for all tests."""
    return functools.lru_cache(lambda workers: workers.run(both))


@pytest.mark.slow
def test_our_errors_have_the_types_of_torchs(workers4, measure) -> None:
    for theirs, ours in measure(workers4):
        differ = [
            f"{name}: torch {theirs[name]}, ours {ours[name]}"
            for name in theirs
            if ours[name] and not set(theirs[name]) <= set(ours[name]) and name not in OURS_IS_OTHER
        ]
        assert not differ
        assert not [name for name in theirs if theirs[name] and not ours[name]]
        needless = [name for name in OURS_IS_OTHER if set(theirs[name]) <= set(ours[name])]
        assert not needless, "ours is of torch's type after all"


@pytest.mark.slow
def test_what_ours_refuses_is_a_shardwise_error(workers4, measure) -> None:
    for _, ours in measure(workers4):
        others = [name for name in ours if ours[name] and "ShardwiseError" not in ours[name]]
        # Python's own: a signature or an attribute; and torch's, for operators.
        own = [name for name in others if set(ours[name]) - {"TypeError", "AttributeError"}]
        assert {name.partition(":")[0] for name in own} <= {"tensor", "ShardedTensor"}
