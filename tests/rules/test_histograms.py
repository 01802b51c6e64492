"""Histograms of split tensors: counts are added, and ends are agreed on."""

from __future__ import annotations

import torch
from rule_cases import heard, in_layout, ranks, values

from shardwise import DeviceMesh, Shard
from shardwise.testing import Sample, check_rule

X = values(5, 4, grad=False)


def test_histograms() -> None:
    edges = torch.tensor([-2.0, 0, 0.5, 3]).double()
    samples = [
        Sample(X, 4, density=True, weight=X.abs()),
        Sample(X, edges, density=True),
        Sample(X, 3, range=(-2.0, 2.0)),
        Sample(torch.ones(3), 2),
        Sample(torch.ones(0), 2),
    ]
    check_rule(torch.histogram, samples, most=6, allow_missing=True)


def test_histograms_of_several_dims() -> None:
    samples = [
        Sample(X, [1, 2, 3, 2], weight=X[:, 0].abs(), density=True),
        Sample(X.view(5, 2, 2), 2, range=[-1.0, 1, -2, 2]),
        Sample(X[:, :2], [X[0, :2].msort(), X[1].msort()]),
    ]
    check_rule(torch.histogramdd, samples, most=6, allow_missing=True)


def test_only_ends_and_counts_travel() -> None:
    def run(mesh: DeviceMesh) -> list[tuple[str, tuple[int, ...]]]:
        x = in_layout(values(100), mesh, Shard(0))
        events, _ = heard(mesh, lambda: torch.histogram(x, 7))
        return [(each.kind, each.shape) for each in events]

    assert ranks(run) == [[("all_reduce", (1, 2)), ("all_reduce", (7,))]] * 2
