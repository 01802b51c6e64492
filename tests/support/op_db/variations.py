"""An operator with inputs of other kinds: strided in memory, or plain tensors beside DTensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

from support.op_db import ours
from support.op_db.cases import Case, cases, with_plain
from support.op_db.entries import MEMORIES, Call, Entry
from support.op_db.expected import REFUSED
from support.op_db.reference import reference

MEMORY_MATTERS = ("as_strided", "as_strided_copy", "as_strided_scatter", "as_strided.partial_views")
"""Operators whose arguments refer to memory: DTensors have that of their pieces."""


def in_other_memory(entry: Entry, samples: int, most: int) -> Iterator[str]:
    """Try an operator with inputs that are not contiguous: yield what is wrong.

    Arguments:
        samples: the number of samples to try.
        most: the number of cases of each, in each form of memory.
    """
    for call in _calls(entry, samples):
        for memory in MEMORIES:
            if memory != "contiguous" and entry.name not in MEMORY_MATTERS:
                placed = replace(call, memory=memory)
                seed = f"{entry.name} {memory} {call.number}"
                yield from _problems(placed, cases(call.sample.tensors(), 1, most, seed), 3)


def with_plain_tensors(entry: Entry, samples: int, most: int) -> Iterator[str]:
    """Try an operator with DTensors and plain tensors among its inputs: yield what is wrong.

    Arguments:
        samples: the number of samples to try, as a function, as a method and in place.
        most: the number of cases of each, and of ways to choose the plain tensors.
    """
    for form in entry.forms():
        for call in _calls(entry, samples) if form != "out" else ():
            if form == "in place" and call.broadcasts:
                continue
            seed = f"{entry.name} {form} {call.number}"
            found = [
                chosen
                for case in cases(call.sample.tensors(), 1, most, seed)
                for chosen in with_plain(case, most, seed)
            ]
            yield from _problems(call.in_form(form), found, 2)


def _calls(entry: Entry, samples: int) -> list[Call]:
    kinds = entry.kinds()
    return entry.samples(kinds[0], samples) if kinds else []


def _problems(call: Call, tried: Sequence[Case], ranks: int) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = reference(call) if tried else None
        if expected is None:
            return
        for outcome in ours.outcomes(call, (ranks,), tried, expected):
            is_refused = outcome.kind == "refused" and (
                call.entry.name in REFUSED or call.form == "in place"
            )
            if outcome.kind in ("wrong", "refused") and not is_refused:
                yield outcome.text
