"""Histograms of split tensors: counts are added, and ends are agreed on."""

from __future__ import annotations

import pytest
import torch
from support.rules import heard, in_layout, ranks, values

from shardwise import DeviceMesh, DispatchError, Replicate, Shard
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
    check_rule(torch.histc, [Sample(X, 4), Sample(torch.ones(0), 4)], most=6, allow_missing=True)


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
        edges = in_layout(values(8, grad=False).msort(), mesh, Replicate())
        events, _ = heard(mesh, lambda: [torch.histogram(x, 7), torch.histogram(x, edges)])
        return [(each.kind, each.shape) for each in events]

    counts = ("all_reduce", (7,))
    assert ranks(run) == [[("all_reduce", (1, 2)), counts, counts]] * 2


def test_given_edges_are_returned_as_torch_does_a_copy_or_themselves() -> None:
    def run(mesh: DeviceMesh) -> None:
        edges = in_layout(values(8, grad=False).msort(), mesh, Replicate())
        x = in_layout(values(6, grad=False), mesh, Shard(0))
        assert torch.histogram(x, edges)[1].to_local().data_ptr() != edges.to_local().data_ptr()
        _, (same,) = torch.histogramdd(x.view(6, 1), [edges])
        assert same.to_local().data_ptr() == edges.to_local().data_ptr()
        for column in (x.view(6, 1), in_layout(values(6, 1, grad=False), mesh, Replicate())):
            _, (moved,) = torch.histogramdd(column, [in_layout(edges, mesh, Shard(0))])
            with pytest.raises(DispatchError, match="histogramdd"):
                moved.add_(1)

    ranks(run)
