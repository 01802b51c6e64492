"""torch's own DTensor through the same cases, to show beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from their_ranks import Ranks, TooLongError
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.rules.calls import tensors_in
from shardwise.testing import Reference, Sample, Tolerance, _loss

Place = Literal["R", "P"] | tuple[Literal["S"], int]
"""How a tensor lies on one axis of a mesh: replicated, contributions, or split on a dim."""


def outcome(
    fn: Callable[..., Any],
    sample: Sample,
    mesh_shape: tuple[int, ...],
    places: Sequence[Sequence[Place]],
    expected: Reference,
    *,
    tolerance: Tolerance,
    random: bool = False,
    seconds: float = 20.0,
) -> str:
    """What torch's DTensor makes of a call: "pass", or in a few words what is wrong.

    Arguments:
        places: for each tensor of the sample, its place on each axis of the mesh.
        expected: results and gradients of the call in one process.
        random: whether the results are random, so that only their shapes and dtypes can be right.
        seconds: how long it may take.
    """

    def on_rank(rank: int, mesh: DeviceMesh) -> str:
        return _on_rank(fn, sample, mesh, places, expected, tolerance, random)

    try:
        found = _ranks(mesh_shape).run(on_rank, seconds)
    except TooLongError:
        del _made[mesh_shape]
        return "takes too long"
    except _BackwardError as error:
        return f"backward: {_said(error.__cause__)}"
    except Exception as error:
        return _said(error)
    return next((each for each in found if each != "pass"), "pass")


def draws(fn: Callable[..., Any], sample: Sample) -> bool:
    """Whether a call draws random numbers; op_db seeds some, so to call it twice does not tell."""
    with _Draws() as seen, torch.no_grad(), torch.random.fork_rng(devices=[]):
        args, kwargs = sample.filled([each.detach().clone() for each in sample.tensors()])
        fn(*args, **kwargs)
    return seen.any


class _Draws(TorchDispatchMode):
    """Sees whether an operator draws random numbers."""

    any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any = self.any or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class _BackwardError(Exception):
    """What was raised after the results were right."""


_made: dict[tuple[int, ...], Ranks] = {}


def _ranks(mesh_shape: tuple[int, ...]) -> Ranks:
    if mesh_shape not in _made:
        _made[mesh_shape] = Ranks(mesh_shape)
    return _made[mesh_shape]


def _on_rank(
    fn: Callable[..., Any],
    sample: Sample,
    mesh: DeviceMesh,
    places: Sequence[Sequence[Place]],
    expected: Reference,
    tolerance: Tolerance,
    random: bool,
) -> str:
    inputs = [
        _distributed(tensor, mesh, where)
        for tensor, where in zip(sample.tensors(), places, strict=True)
    ]
    args, kwargs = sample.filled(inputs)
    outputs = [_whole(each) for each in tensors_in(fn(*args, **kwargs))]
    problem = _problem(outputs, expected.outputs, tolerance, random)
    if problem or expected.gradients is None:
        return problem or "pass"
    try:
        gradients = _gradients(outputs, [each for each in inputs if each.requires_grad])
    except Exception as error:
        raise _BackwardError from error
    wanted = [torch.zeros_like(got) if want is None else want
              for got, want in zip(gradients, expected.gradients, strict=True)]  # fmt: skip
    problem = _problem(gradients, wanted, tolerance, random)
    return problem.replace("value", "gradient").replace("wrong", "gradient: wrong") or "pass"


def _distributed(tensor: torch.Tensor, mesh: DeviceMesh, places: Sequence[Place]) -> DTensor:
    """A leaf that lies so, of a tensor that every rank has."""
    placements: list[Placement] = []
    local = tensor.detach()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "every rank is on the mesh"
    for place, size, at in zip(places, mesh.shape, coordinate, strict=True):
        if place == "R":
            placements.append(Replicate())
        elif place == "P":  # contributions whose sum is exact
            placements.append(Partial())
            local = local * (2, -1)[at] if at < 2 else torch.zeros_like(local)
        else:
            placements.append(Shard(place[1]))
            pieces = local.chunk(size, place[1])
            local = pieces[at] if at < len(pieces) else local.narrow(place[1], 0, 0)
    result = DTensor.from_local(
        local.clone(),
        mesh,
        placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return result.requires_grad_(tensor.requires_grad)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _gradients(
    outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Of every leaf; of one that gets none, zero."""
    _loss(outputs).backward()  # type: ignore[no-untyped-call]
    return [
        torch.zeros(leaf.shape, dtype=leaf.dtype) if leaf.grad is None else _whole(leaf.grad)
        for leaf in leaves
    ]


def _problem(
    got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], tolerance: Tolerance, random: bool
) -> str:
    if len(got) != len(want):
        return "wrong number of results"
    for have, right in zip(got, want, strict=True):
        if have.shape != right.shape:
            return "wrong shape"
        if have.dtype != right.dtype:
            return "wrong dtype"
        loose = 1.0 if right.dtype in (torch.float64, torch.complex128) else 3e3
        if not random and not torch.allclose(
            have.detach(),
            right.detach(),
            rtol=tolerance.rtol * loose,
            atol=tolerance.atol * loose,
            equal_nan=True,
        ):
            return "wrong value"
    return ""


def _said(error: BaseException | None) -> str:
    text = str(error)
    if error is not None and "Sharding propagation failed" in text:
        error = error.__cause__ or error  # said in other words
    if "does not have a sharding strategy registered" in text:
        return "no strategy"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"raises {type(error).__name__}: {first[:100]}"
