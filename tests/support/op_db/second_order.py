"""The second gradients of a call on our DTensors, with empty pieces on some ranks.

Whether a result or a gradient requires grad must be the same on all ranks: otherwise only some of
them take part in the collectives of the next backward. On six ranks most samples have empty pieces.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from shardwise.comm import communicator
from shardwise.core.errors import ShardwiseError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh, init_device_mesh
from shardwise.dtensor.state import fallback
from shardwise.dtensor.tensor import tensors_in
from shardwise.run.simulate import simulate
from shardwise.testing import distributed, loss_of, whole_of
from support.op_db.cases import Case, cases, shown
from support.op_db.entries import Call, Entry, entries
from support.op_db.expected import REFUSED
from support.op_db.reference import SEED, difference

RANKS = 6

NOT_COMPARED = {
    "logcumsumexp": "torch's own gradients overflow for its sample of the largest float",
    "nn.functional.linear_cross_entropy.chunked": "torch has none, DTensors have",
    "nn.functional.linear_cross_entropy.chunked_none": "torch has none, DTensors have",
}
"""Operators of which second gradients are computed, but not compared: why."""

Gradients = list[torch.Tensor | None]

Loss = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def loss_of_squares(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a loss whose gradient by the results depends on them, as `loss_of` does not."""
    return loss_of([each * each for each in outputs])


LOSSES: tuple[Loss, ...] = (loss_of, loss_of_squares)


def names() -> list[str]:
    """Return the operators that torch differentiates twice, with the same values each time."""
    return [name for name, entry in entries().items() if _has_second_gradients(entry)]


def _has_second_gradients(entry: Entry) -> bool:
    info = entry.info
    return (
        info.supports_autograd
        and info.supports_gradgrad
        and torch.float64 in info.supported_dtypes("cpu")
        and not entry.sets_seed
    )


def problems(entry: Entry, samples: int, most: int) -> Iterator[str]:
    """Try an operator: yield what is wrong.

    Arguments:
        samples: the number of samples to try.
        most: the number of cases of each.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in entry.samples(torch.float64, samples):
            if any(each.dtype == torch.float32 for each in call.sample.tensors()):
                continue  # weights that are less exact than the input
            seed = f"second order {entry.name} {call.number}"
            tried = cases(call.sample.tensors(), 1, most, seed)
            for loss in LOSSES:
                check = _Check(call, loss)
                expected = check.on_plain()
                for case in tried if expected is not None else ():
                    problem = check.problem(case, expected)
                    if problem:
                        name = f"{entry.name} {call.sample} as {shown(case)}"
                        yield f"{name}, {loss.__name__}: {problem}"


class _DiffersError(Exception):
    """Ranks differ in what requires grad."""


@dataclass(frozen=True)
class _Both:
    """First and second gradients of the inputs that require grad."""

    first: Gradients
    second: Gradients | None
    """None if no first gradient requires grad."""


@dataclass(frozen=True)
class _Check:
    """The check of one call."""

    call: Call
    loss: Loss

    def gradients(
        self, inputs: Sequence[torch.Tensor], agree: Callable[[str, list[bool | None]], None]
    ) -> _Both | None:
        """Compute both gradients; None if no result requires grad, or the loss is not finite.

        Arguments:
            agree: is told what requires grad.
        """
        torch.manual_seed(SEED)
        graded = list(tensors_in(self.call.graded(self.call.on(inputs))))
        agree("results", [each.requires_grad for each in graded])
        outputs = [whole_of(each) for each in graded if each.requires_grad]
        leaves = [each for each in inputs if each.requires_grad]
        if not outputs or not leaves:
            return None
        loss = self.loss(outputs)
        if not bool(loss.detach().isfinite()):
            return None
        first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        agree("gradients", [None if each is None else each.requires_grad for each in first])
        # A missing gradient keeps its place: the weights of the others depend on theirs.
        whole = [torch.zeros(()) if each is None else whole_of(each) for each in first]
        if not any(each.requires_grad for each in whole):
            return _Both(list(first), None)
        second = torch.autograd.grad(loss_of(whole), leaves, allow_unused=True)
        agree("second gradients", [None if each is None else True for each in second])
        return _Both(list(first), list(second))

    def on_plain(self) -> _Both | None:
        """Compute both gradients in one process; None if torch has none for this sample."""
        inputs = [each.detach().clone().requires_grad_(each.requires_grad)
                  for each in self.call.sample.tensors()]  # fmt: skip
        try:
            return self.gradients(inputs, lambda what, facts: None)
        except Exception:
            return None

    def problem(self, case: Case, expected: _Both) -> str:
        """Return what is wrong with a case, or an empty text."""

        def run() -> str:
            return self.on_rank(init_device_mesh("cpu", (RANKS,)), case, expected)

        try:
            return next(filter(None, simulate(run, RANKS)), "")
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:1500]

    def on_rank(self, mesh: DeviceMesh, case: Case, expected: _Both) -> str:
        """Return what is wrong with a case on one rank."""

        def agree(what: str, facts: list[bool | None]) -> None:
            by_rank = communicator(mesh).gather_objects(facts)
            if any(each != facts for each in by_rank):
                raise _DiffersError(f"requires_grad of the {what} differs between ranks: {by_rank}")

        with fallback("replicate"):
            try:
                inputs = [
                    distributed(each, Layout.from_placements(mesh, each.shape, how))
                    for each, how in zip(self.call.sample.tensors(), case, strict=True)
                ]
                made = self.gradients(inputs, agree)
            except _DiffersError as error:
                return str(error)
            except ShardwiseError as error:
                return "" if self.call.entry.name in REFUSED else f"refused: {error}"
        if made is None:
            return "the result requires no grad"
        problem = _difference(made.first, expected.first)
        if problem:
            return f"first gradient {problem}"
        if self.call.entry.name in NOT_COMPARED:
            return ""
        problem = _difference(made.second, expected.second)
        return f"second gradient {problem}" if problem else ""


def _difference(got: Gradients | None, want: Gradients | None) -> str:
    """Compare gradients; a missing gradient is zero."""
    count = len(got or want or [])
    pairs = zip(got or [None] * count, want or [None] * count, strict=True)
    for at, (have, expected) in enumerate(pairs):
        whole = None if have is None else whole_of(have.detach())
        known = expected if expected is not None else whole
        if known is None:
            continue
        zeros = torch.zeros_like(known)
        have = zeros if whole is None else whole
        problem = difference([have], [zeros if expected is None else expected.detach()])
        if problem:
            return f"of input {at}: {problem}"
    return ""
