"""The outcome of an operator, over all its samples, forms, dtypes, meshes and layouts."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from support.op_db import ours
from support.op_db.cases import MESHES, Case, cases, single_splits
from support.op_db.entries import Call, Entry, entries
from support.op_db.ours import Outcome
from support.op_db.reference import Reference, reference


class Effort(NamedTuple):
    """How many cases of each operator are tried."""

    samples: int
    """With the main dtype, as a function."""
    meshes: int
    """For each of these samples."""
    cases: int
    """On each mesh."""
    variations: int
    """Samples of each other dtype and form."""
    cases_of_variations: int
    splits: bool
    """Whether to find out what it costs to split each dim alone."""


THEIR_CASES = 3
"""The cases of a mesh that torch's DTensor is tried with: one takes it as long as ours two."""

SWEEP = Effort(samples=6, meshes=3, cases=8, variations=2, cases_of_variations=4, splits=True)
PART = Effort(samples=3, meshes=1, cases=5, variations=1, cases_of_variations=2, splits=False)


NOTHING = "nothing to split"
"""The outcome of an operator without tensors among its arguments, or that no CPU runs."""


@dataclass
class Row:
    """The outcome of one operator: a row of the page."""

    name: str
    counts: dict[str, int] = field(default_factory=dict)
    """How many cases came out so, by kind of outcome."""
    texts: list[str] = field(default_factory=list)
    """What is wrong, or refused and why: the first few."""
    splits: list[str] = field(default_factory=list)
    """For each tensor of a sample: which dims may be split, and what that costs."""
    forms: list[str] = field(default_factory=list)
    """The forms that were tried."""
    refused: list[str] = field(default_factory=list)
    """Those of them that were refused in some case."""
    unstable: list[str] = field(default_factory=list)
    """Results and gradients of which no values were compared, as torch does not reproduce them."""
    theirs: dict[str, int] = field(default_factory=dict)
    """Of some of these cases with torch's DTensor, how many came out so: "pass", or the problem."""
    theirs_when_even: str = ""
    """"pass" if torch's DTensor gets the values of all cases that are whole or evenly split over
    one axis, as torch's own tests ask; else the first problem; empty if there were none."""

    @property
    def outcome(self) -> str:
        """Return the worst outcome of all cases."""
        return next((each for each in ours.ORDER if self.counts.get(each)), NOTHING)

    def add(self, outcome: Outcome, form: str) -> None:
        self.counts[outcome.kind] = self.counts.get(outcome.kind, 0) + 1
        if outcome.kind == "refused" and form not in self.refused:
            self.refused.append(form)
        if outcome.text and sum(outcome.kind in each[:8] for each in self.texts) < 4:
            self.texts.append(f"{outcome.kind}: {outcome.text}")


class Attempt(NamedTuple):
    """A call to compare on one mesh, in these cases."""

    call: Call
    mesh: tuple[int, ...]
    cases: list[Case]


def attempts(entry: Entry, effort: Effort) -> Iterator[Attempt]:
    """Yield what is tried: the main dtype thoroughly, each other dtype and form about once.

    The mesh of a sample follows from its position.
    """
    turn = zlib.crc32(entry.name.encode())
    main, *others = entry.kinds() or [None]
    if main is None:
        return
    plans = [(main, "function", effort.samples, effort.meshes, effort.cases)]
    plans += [
        (dtype, "function", effort.variations, 1, effort.cases_of_variations) for dtype in others
    ]
    plans += [
        (main, form, effort.variations, 1, effort.cases_of_variations)
        for form in entry.forms()
        if form != "function"
    ]
    if effort is PART and len(plans) > 3:  # the variations take turns, from entry to entry
        plans = [plans[0], *(plans[1 + (turn + more) % (len(plans) - 1)] for more in range(2))]
    for dtype, form, samples, meshes, most in plans:
        for at, call in enumerate(entry.samples(dtype, samples)):
            if form == "in place" and call.broadcasts:
                continue
            call = call.in_form(form)
            tensors = call.sample.tensors()
            for more in range(meshes):
                mesh = MESHES[(turn + at + more) % len(MESHES)]
                seed = f"{entry.name} {form} {dtype} {call.number} {mesh}"
                tried = cases(tensors, len(mesh), most, seed)
                if tried:
                    yield Attempt(call, mesh, tried)


def row_of(name: str, effort: Effort, beside_torch: bool = False) -> Row:
    """Try an operator, and torch's DTensor beside ours if asked to."""
    entry = entries()[name]
    row = Row(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected: dict[Call, Reference | None] = {}
        for attempt in attempts(entry, effort):
            call, form = attempt.call, attempt.call.form
            if call not in expected:
                expected[call] = known = reference(call)
                for what in known.unstable_names() if known is not None else ():
                    row.unstable.append(f"{what} of ({form}) {call.sample}")
            known = expected[call]
            if known is None:
                continue
            for outcome in ours.outcomes(call, attempt.mesh, attempt.cases, known):
                row.add(outcome, form)
            if form not in row.forms:
                row.forms.append(form)
            if beside_torch and form == "function" and call.dtype == entry.kinds()[0]:
                _try_theirs(row, attempt, known)
        if effort.splits:
            _try_splits(row, expected)
    return row


def _try_theirs(row: Row, attempt: Attempt, known: Reference) -> None:
    from support.op_db import theirs  # initialises torch.distributed, which only the sweep needs

    if theirs.LONG in row.theirs:
        return  # and would again
    call, mesh, tried = attempt
    tried = tried[:THEIR_CASES]
    found = theirs.outcomes(call, mesh, tried, known)
    for case, outcome in zip(tried, found, strict=True):
        kind = theirs.kind(outcome)
        row.theirs[kind] = row.theirs.get(kind, 0) + 1
        is_even = theirs.is_even(call.sample.tensors(), mesh, case)
        if is_even and row.theirs_when_even in ("", theirs.PASS):
            row.theirs_when_even = theirs.of_value(outcome)


def _try_splits(row: Row, expected: dict[Call, Reference | None]) -> None:
    """Split each dim of each tensor of one sample alone, and note the cost."""
    calls = [
        call for call, known in expected.items() if call.form == "function" and known is not None
    ]
    if not calls:
        return
    call = max(
        calls, key=lambda each: (each.numbers > 0, len(single_splits(each.sample.tensors())))
    )
    known = expected[call]
    assert known is not None
    found = single_splits(call.sample.tensors())
    made = ours.outcomes(call, (2,), [case for _, _, case in found], known)
    words: dict[int, list[str]] = {}
    for (at, dim, _), outcome in zip(found, made, strict=True):
        row.add(outcome, "function")
        words.setdefault(at, []).append(f"{dim}{_cost(outcome)}")
    tensors = call.sample.tensors()
    row.splits = [
        f"{_shown(each)}: {', '.join(words[at])}" for at, each in enumerate(tensors) if at in words
    ]


def _shown(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.nbytes} B"


def _cost(outcome: Outcome) -> str:
    """Return what a split costs: nothing, or the bytes that one of two ranks receives."""
    if outcome.kind not in ("rule", "fallback"):
        return f" ({outcome.kind})"
    parts = []
    for kind in dict.fromkeys(kind for kind, _ in outcome.collectives):
        sizes = [size for each, size in outcome.collectives if each == kind]
        parts.append(f"{f'{len(sizes)} ' if len(sizes) > 1 else ''}{kind} {sum(sizes)} B")
    if outcome.kind == "fallback":
        parts = ["whole", *parts]
    return f" ({', '.join(parts)})" if parts else ""
