"""diff, gradient and trapezoid along split dims."""

from __future__ import annotations

import torch
from support.rules import heard, in_layout, ranks, values

from shardwise import DeviceMesh, Shard
from shardwise.testing import Sample, check_rule

X = values(5, 4)


def test_differences() -> None:
    ends = [values(1, 4), values(2, 4)]
    samples = [Sample(X, 2, 0), Sample(X, 0), Sample(X, 6, 0), Sample(X, 1, 0, *ends)]
    samples += [Sample(X, 0, 0, *ends)]
    check_rule(torch.diff, samples, most=8, allow_missing=True)


def test_slopes() -> None:
    places = [torch.tensor([0.0, 1, 3, 4, 7]).double().requires_grad_(), values(4)]
    samples = [
        Sample(X, edge_order=2),
        Sample(values(3, 3), edge_order=2),
        Sample(X, spacing=places),
        Sample(values(3, 2), spacing=[2.0, 0.5], dim=(1, 0)),
        Sample(torch.arange(5)),
    ]
    check_rule(torch.gradient, samples, most=12, allow_missing=True)


def test_integrals() -> None:
    samples = [
        Sample(X, values(4)),
        Sample(X, dx=0.5, dim=0),
        Sample(X, values(5, 4), dim=0),
        Sample(values(1, 4), X),
    ]
    check_rule(torch.trapz, samples, most=5, allow_missing=True)
    check_rule(torch.cumulative_trapezoid, samples, most=5, allow_missing=True)


def test_neighbours_are_all_that_is_sent() -> None:
    def run(mesh: DeviceMesh) -> list[object]:
        x = in_layout(values(100), mesh, Shard(0))
        calls = (torch.diff, lambda x: torch.gradient(x)[0], torch.trapezoid)
        return [
            [(each.kind, each.bytes) for each in heard(mesh, lambda f=f: f(x))[0]] for f in calls
        ]

    one, two = [("all_to_all", 8)], [("all_to_all", 16)]
    assert ranks(run, 4)[1] == [one, two, one]
