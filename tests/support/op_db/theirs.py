"""Run a call on torch's own DTensors, to show the outcome beside ours.

Views, types of results and random values are not checked, unlike those of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils import _pytree as pytree

from shardwise.core import placement as our
from shardwise.dtensor.tensor import tensors_in
from shardwise.testing import contribution, loss_of
from support.op_db.cases import Case, How
from support.op_db.entries import Call
from support.op_db.reference import SEED, Reference, difference, leaves, unambiguous
from support.op_db.their_ranks import Ranks, TooLongError

PASS = "pass"
_BACKWARD = "backward: "
LONG = "takes too long"


def outcomes(
    call: Call,
    mesh_shape: tuple[int, ...],
    cases: Sequence[Case],
    expected: Reference,
    seconds: float = 10.0,
) -> list[str]:
    """Return the outcome of each case: "pass", or in a few words what is wrong.

    With many inputs, DTensor may search minutes for a strategy: after one case that takes too long
    the rest are not tried.
    """
    attempt = _Attempt(call, expected)
    found: list[str] = []
    for case in cases:
        if found and found[-1] == LONG:
            found.append(LONG)
            continue
        outcome = attempt.outcome(mesh_shape, case, seconds)
        if outcome not in (PASS, LONG):  # on a busy machine some failures are of the moment
            outcome = attempt.outcome(mesh_shape, case, seconds)
        found.append(outcome)
    return found


def kind(outcome: str) -> str:
    """Return an outcome without its details: "wrong value", "backward: raises RuntimeError", ..."""
    backward = outcome.startswith(_BACKWARD)
    first, _, _ = outcome.removeprefix(_BACKWARD).partition(": ")
    if first.startswith("result "):  # of several
        first = outcome.split(": ")[1 + backward]
    return _BACKWARD * backward + first


def is_even(tensors: Sequence[torch.Tensor], mesh_shape: tuple[int, ...], case: Case) -> bool:
    """Return whether a case has one axis and every tensor is whole or evenly split."""
    return len(mesh_shape) == 1 and all(
        not how[0].is_partial()
        and not (isinstance(how[0], our.Shard) and tensor.shape[how[0].dim] % mesh_shape[0])
        for tensor, how in zip(tensors, case, strict=True)
    )


def of_value(outcome: str) -> str:
    """Return the outcome of the values, without that of the gradients."""
    return PASS if outcome.startswith(_BACKWARD) else outcome


class _BackwardError(Exception):
    """An error of the backward, after the results were right."""


_made: dict[tuple[int, ...], Ranks] = {}


def _ranks(mesh_shape: tuple[int, ...]) -> Ranks:
    if mesh_shape not in _made:
        _made[mesh_shape] = Ranks(mesh_shape)
    return _made[mesh_shape]


@dataclass(frozen=True)
class _Attempt:
    """One call."""

    call: Call
    expected: Reference

    def outcome(self, mesh_shape: tuple[int, ...], case: Case, seconds: float) -> str:
        """Return the outcome of one case."""
        state = torch.get_rng_state()
        try:
            problems = _ranks(mesh_shape).run(lambda rank, mesh: self.problem(mesh, case), seconds)
        except TooLongError:
            del _made[mesh_shape]
            return LONG
        except _BackwardError as error:
            return _BACKWARD + _said(error.__cause__)
        except Exception as error:
            return _said(error)
        finally:
            torch.set_rng_state(state)
        return next(filter(None, problems), PASS)

    def problem(self, mesh: DeviceMesh, case: Case) -> str:
        """Return what is wrong with a case on one rank, or an empty text."""
        expected, plain = self.expected, self.call.sample.tensors()
        inputs = [_distributed(each, mesh, how) for each, how in zip(plain, case, strict=True)]
        if self.call.form != "out":
            for each, tensor in zip(inputs, plain, strict=True):
                each.requires_grad_(tensor.requires_grad)
        torch.manual_seed(SEED)
        made = _whole(self.call.on(inputs))
        results = list(leaves(unambiguous(self.call, plain, made)))
        comparable = expected.is_filled and not expected.is_random
        problem = difference(results, expected.results, comparable, expected.unstable)
        if problem or expected.gradients is None or not comparable:
            return problem
        try:
            graded = [each for each in inputs if each.requires_grad]
            problem = self.problem_of_gradients(made, graded)
        except Exception as error:
            raise _BackwardError from error
        return problem and _BACKWARD + problem

    def problem_of_gradients(self, made: Any, inputs: Sequence[DTensor]) -> str:
        """Return what is wrong with the gradients. A missing gradient is zero."""
        outputs = [each for each in tensors_in(self.call.graded(made)) if each.requires_grad]
        if not outputs:
            return "the result requires no gradient"
        loss_of(outputs).backward()
        zeros = [torch.zeros(each.shape, dtype=each.dtype) for each in inputs]
        got = [zero if each.grad is None else _whole(each.grad)
               for each, zero in zip(inputs, zeros, strict=True)]  # fmt: skip
        expected = self.expected.gradients or []
        want = [zero if each is None else each for each, zero in zip(expected, zeros, strict=True)]
        return difference(got, want, unstable=self.expected.unstable_gradients)


def _distributed(tensor: torch.Tensor, mesh: DeviceMesh, how: How) -> DTensor:
    """Distribute a tensor that every rank has, into the same shards and contributions as ours."""
    local = tensor.detach()
    placements: list[Any] = []
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "every rank is on the mesh"
    for placement, size, at in zip(how, mesh.shape, coordinate, strict=True):
        if isinstance(placement, our.Shard):
            dim = placement.dim
            pieces = local.chunk(size, dim)
            local = pieces[at] if at < len(pieces) else local.narrow(dim, 0, 0)
            placements.append(Shard(dim))
        elif placement.is_partial():
            local = contribution(local, at, size)
            placements.append(Partial())
        else:
            placements.append(Replicate())
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _whole(made: Any) -> Any:
    """Return a result with every tensor gathered."""
    return pytree.tree_map_only(DTensor, DTensor.full_tensor, made)


def _said(error: BaseException | None) -> str:
    """Format an error in a few words."""
    text = str(error)
    if "does not have a sharding strategy registered" in text:
        return "no strategy"
    if error is not None and "Sharding propagation failed" in text:
        error = error.__cause__ or error  # which says it with less around it
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"raises {type(error).__name__}: {first[:100]}"
