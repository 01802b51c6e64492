"""Which splits of an operator's inputs are legal, found by trying; and do all go without
communication?"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.comm import Event, listen
from shardwise.dispatch.errors import AGREEING
from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh, init_device_mesh
from shardwise.placement import Placement, Replicate, Shard
from shardwise.rules.calls import tensors_in
from shardwise.sim import simulate
from shardwise.testing.combinations import combinations
from shardwise.testing.comparing import value_difference, widened
from shardwise.testing.layouts import distributed
from shardwise.testing.reference import Tolerance, reference_of
from shardwise.testing.sample import Sample


def missing_splits(fn: Callable[..., Any], sample: Sample) -> list[str]:
    """Splits of the inputs over two ranks that need no communication, but for which there is."""
    expected = reference_of(fn, sample, False, Tolerance(1e-5, 1e-8)).outputs
    tensors = sample.tensors()
    choices = [[None, *range(each.dim())] for each in tensors]
    legal = [
        dims
        for dims in combinations(choices, 200, 0)
        if any(dim is not None for dim in dims) and _is_legal(fn, sample, dims, expected)
    ]

    def run() -> list[str]:
        mesh = init_device_mesh("cpu", (2,))
        return [_communicates(fn, sample, _placements(dims), mesh) for dims in legal]

    found = simulate(run, 2)[0] if legal else []
    return [
        f"{sample} with {', '.join(map(repr, _placements(dims)))}: {kind}"
        for dims, kind in zip(legal, found, strict=True)
        if kind
    ]


def _placements(dims: Sequence[int | None]) -> list[Placement]:
    return [Replicate() if dim is None else Shard(dim) for dim in dims]


def _communicates(
    fn: Callable[..., Any], sample: Sample, placements: Sequence[Placement], mesh: DeviceMesh
) -> str:
    """The first collective of a call, or nothing."""
    events: list[Event] = []
    inputs = [
        distributed(each, Layout.from_placements(mesh, each.shape, [placement]))
        for each, placement in zip(sample.tensors(), placements, strict=True)
    ]
    args, kwargs = sample.filled(inputs)
    with listen(events.append), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fn(*args, **kwargs)
    for event in events:
        if event.rank == mesh.get_rank() and not event.cause.operator.startswith(AGREEING):
            return event.kind
    return ""


def _is_legal(
    fn: Callable[..., Any], sample: Sample, dims: Sequence[int | None], expected: Sequence[Any]
) -> bool:
    """Whether the results of two ranks with these pieces, joined or added, are the results."""
    pieces = []
    for rank in range(2):
        local = []
        for tensor, dim in zip(sample.tensors(), dims, strict=True):
            tensor = tensor.detach().clone()
            if dim is not None:
                chunks = tensor.chunk(2, dim)
                if len(chunks) < 2:
                    return False
                tensor = chunks[rank].clone()
            local.append(tensor)
        args, kwargs = sample.filled(local)
        try:
            pieces.append(list(tensors_in(fn(*args, **kwargs))))
        except Exception:
            return False
    return len(pieces[0]) == len(pieces[1]) == len(expected) and all(
        _joins(first, second, whole) for first, second, whole in zip(*pieces, expected, strict=True)
    )


def _joins(first: torch.Tensor, second: torch.Tensor, whole: torch.Tensor) -> bool:
    first, second, whole = widened(first), widened(second), widened(whole)

    def same(made: torch.Tensor) -> bool:
        return made.shape == whole.shape and not value_difference(made, whole, rtol=1e-5, atol=1e-8)

    if first.dim() != whole.dim() or second.dim() != whole.dim():
        return False
    if first.shape == second.shape and same(first + second):
        return True
    for dim in range(whole.dim()):
        others = [each for at, each in enumerate(first.shape) if at != dim]
        if others != [each for at, each in enumerate(second.shape) if at != dim]:
            continue
        sizes = [each.shape[dim] for each in whole.chunk(2, dim)]
        if [first.shape[dim], second.shape[dim]] == sizes and same(torch.cat([first, second], dim)):
            return True
    return False
