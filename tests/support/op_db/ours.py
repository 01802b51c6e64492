"""Run a call on our DTensors, on simulated ranks, and judge the outcome."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm import Event, listen
from shardwise.core.errors import ShardwiseError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh, init_device_mesh
from shardwise.dtensor.state import fallback, fallback_counts
from shardwise.dtensor.tensor import DTensor, as_local, find_detaching_operator, tensors_in
from shardwise.rules.registry import RuleError
from shardwise.run.simulate import simulate
from shardwise.testing import distributed, loss_of, whole_of
from support.op_db.cases import Case, How, shown
from support.op_db.entries import Call
from support.op_db.reference import (
    SEED,
    Reference,
    difference,
    leaves,
    memory,
    unambiguous,
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case on all ranks."""

    kind: str
    """"rule", "fallback", "refused" or "wrong"."""
    text: str = ""
    """Why it is refused or wrong, or who fell back."""
    collectives: tuple[tuple[str, int], ...] = ()
    """What the call itself communicated, forward: kinds and bytes received by rank 0."""


def outcomes(
    call: Call, mesh_shape: tuple[int, ...], cases: Sequence[Case], expected: Reference
) -> list[Outcome]:
    """Return the outcome of each case."""
    ranks = math.prod(mesh_shape)
    attempt = _Attempt(call, mesh_shape, expected)
    try:
        by_rank = simulate(lambda: attempt.run(cases), ranks)
    except Exception as error:
        # Ranks that parted, most likely: find out in which case.
        if len(cases) == 1:
            text = f"{attempt.named(cases[0])}: ranks part: {type(error).__name__}: {error}"
            return [Outcome("wrong", text[:1500])]
        return [
            outcome for case in cases for outcome in outcomes(call, mesh_shape, [case], expected)
        ]
    return [_joined(each) for each in zip(*by_rank, strict=True)]


ORDER = ("wrong", "refused", "fallback", "rule")


def _joined(by_rank: Sequence[Outcome]) -> Outcome:
    """Join the outcomes of all ranks: the worst counts, and all must refuse if one does."""
    worst = min(by_rank, key=lambda each: ORDER.index(each.kind))
    if worst.kind == "refused" and any(each.kind != "refused" for each in by_rank):
        return Outcome("wrong", f"only some ranks refuse: {worst.text}")
    return Outcome(worst.kind, worst.text, by_rank[0].collectives)


@dataclass(frozen=True)
class _Attempt:
    """One call on one mesh."""

    call: Call
    mesh_shape: tuple[int, ...]
    expected: Reference

    def named(self, case: Case) -> str:
        text = f"{self.call.entry.name} ({self.call.form}) {self.call.sample}"
        if self.call.memory != "contiguous":
            text += f", {self.call.memory} in memory,"
        return f"{text} on {self.mesh_shape} as {shown(case)}"

    def run(self, cases: Sequence[Case]) -> list[Outcome]:
        """Return the outcome of each case on one rank."""
        mesh = init_device_mesh("cpu", self.mesh_shape)
        with fallback("replicate"):
            return [self.outcome(mesh, case) for case in cases]

    def outcome(self, mesh: DeviceMesh, case: Case) -> Outcome:
        before = sum(fallback_counts().values())
        events: list[Event] = []
        try:
            problem = self.problem(mesh, case, events)
        except ShardwiseError as error:
            kind = "wrong" if isinstance(error, RuleError) else "refused"
            return Outcome(kind, f"{self.named(case)}: {type(error).__name__}: {error}")
        except Exception as error:
            return Outcome("wrong", f"{self.named(case)}: raised {type(error).__name__}: {error}")
        heard = tuple((each.kind, each.bytes) for each in events if each.rank == mesh.get_rank())
        if problem:
            return Outcome("wrong", f"{self.named(case)}: {problem}", heard)
        fell = sum(fallback_counts().values()) > before
        return Outcome("fallback" if fell else "rule", "", heard)

    def problem(self, mesh: DeviceMesh, case: Case, events: list[Event]) -> str:
        """Return what is wrong with a case, or an empty text."""
        inputs = [
            self.call.placed(_distributed(each, mesh, how))
            for each, how in zip(self.call.sample.tensors(), case, strict=True)
        ]
        if self.call.form == "out":
            inputs = [each.detach() for each in inputs]
        torch.manual_seed(SEED)
        with listen(events.append):
            made = self.call.on(inputs)
        results = list(leaves(unambiguous(self.call, inputs, made)))
        expected = self.expected
        problem = (
            ("" if None in case else _of_types(results))
            or difference(
                [whole_of(each) if isinstance(each, torch.Tensor) else each for each in results],
                expected.results,
                expected.is_filled,
                expected.unstable,
            )
            or self.of_views(results, inputs)
        )
        if problem or expected.gradients is None:
            return problem
        graded = tensors_in(self.call.graded(made))
        outputs = [whole_of(each) for each in graded if each.requires_grad]
        if not outputs:
            return "wrong gradient: the result requires none"
        loss_of(outputs).backward()
        return _of_gradients([each for each in inputs if each.requires_grad], expected)

    def of_views(self, results: Sequence[Any], inputs: Sequence[torch.Tensor]) -> str:
        """Check that a result is a view where torch returns one, or a copy marked as such."""
        if self.call.memory != "contiguous":
            return ""  # whether memory allows a view depends on the sizes of a rank's piece
        tensors = [each for each in results if isinstance(each, torch.Tensor)]
        for at, (result, of) in enumerate(zip(tensors, self.expected.views, strict=True)):
            with as_local():
                severed = find_detaching_operator(result) is not None
                for number, each in enumerate(inputs):
                    if not memory(each) or not memory(result):
                        continue  # an empty piece
                    shares = memory(each) == memory(result)
                    if shares and number not in of:
                        return f"wrong view: result {at} shares memory with input {number}"
                    if not shares and number in of and not severed:
                        return f"wrong view: result {at} is a copy of input {number}, unmarked"
        return ""


def _distributed(tensor: torch.Tensor, mesh: DeviceMesh, how: How | None) -> torch.Tensor:
    if how is None:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return distributed(tensor, Layout.from_placements(mesh, tensor.shape, how))


def _of_types(results: Sequence[Any]) -> str:
    for each in results:
        if isinstance(each, torch.Tensor) and not isinstance(each, DTensor):
            return "wrong type: a plain tensor, expected a DTensor"
    return ""


def _of_gradients(inputs: Sequence[torch.Tensor], expected: Reference) -> str:
    """Return what is wrong with the gradients. A missing gradient is zero."""
    assert expected.gradients is not None
    for at, (leaf, want) in enumerate(zip(inputs, expected.gradients, strict=True)):
        zeros = torch.zeros(leaf.shape, dtype=leaf.dtype)
        got = zeros if leaf.grad is None else whole_of(leaf.grad)
        is_stable = at not in expected.unstable_gradients
        problem = difference([got], [zeros if want is None else want], is_stable)
        if problem:
            return f"wrong gradient of input {at}: {problem}"
    return ""
