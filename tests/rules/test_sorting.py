"""Sorting, topk, counting, and whether two tensors are equal."""

from __future__ import annotations

import pytest
import torch
from support.rules import heard, in_layout, ranks, values

from shardwise import Partial, Replicate, Shard, init_device_mesh, listen, simulate
from shardwise.core.layout import Layout
from shardwise.testing import Sample, check_rule, distributed, layouts_of

X = values(5, 4)
NUMBERS = torch.tensor([3, 0, 7, 3, 3])


def test_sorting_leaves_the_other_dims_split():
    samples = [Sample(X), Sample(X, 0), Sample(values(2, 3), dim=-1, descending=True)]
    check_rule(torch.sort, samples, most=15)
    check_rule(torch.argsort, samples, most=15)
    check_rule(torch.sort, [Sample(NUMBERS, stable=True)], most=15)
    check_rule(torch.msort, [Sample(X)], most=15)


@pytest.mark.parametrize("largest", [True, False])
def test_topk_along_a_split_dim(largest):
    samples = [
        Sample(X, 2),
        Sample(X, 3, 0, largest),
        Sample(X, 5, dim=0, largest=largest),
        Sample(values(2, 3), 2, 0),
        Sample(X, 0),
    ]
    check_rule(torch.topk, samples, most=15, allow_missing=True)


def test_topk_gathers_only_candidates():
    def run() -> tuple[list[tuple[str, int]], list[float], list[int]]:
        mesh = init_device_mesh("cpu", (2, 2))
        x = torch.tensor([5.0, 9, 1, 9, 2, 8, 0])
        x = distributed(x, Layout(mesh, (7,), {0: (1, 0)}))
        events = []
        with listen(events.append):
            found = x.topk(2)
        assert found.values.placements == (Replicate(), Replicate())
        return [each.kind for each in events], found.values.tolist(), found.indices.tolist()

    for kinds, largest, indices in simulate(run, 4):
        assert set(kinds) == {"all_gather"}
        assert largest == [9.0, 9.0] and sorted(indices) == [1, 3]


def test_topk_of_the_worst_values_picks_no_padding():
    def run() -> list[int]:
        mesh = init_device_mesh("cpu", (4,))
        x = torch.full((5,), -torch.inf)
        return distributed(x, Layout(mesh, (5,), {0: (0,)})).topk(5).indices.tolist()

    assert [sorted(each) for each in simulate(run, 4)] == [[0, 1, 2, 3, 4]] * 4


def test_counting():
    check_rule(torch.histc, [Sample(X, 4), Sample(X.detach(), bins=3, min=-1, max=1)], most=15)
    samples = [Sample(NUMBERS), Sample(NUMBERS, minlength=10), Sample(NUMBERS, values(5).detach())]
    check_rule(torch.bincount, samples, allow_missing=True)
    check_rule(
        torch.histogram, [Sample(X.detach(), 3, range=(-2.0, 2.0))], most=15, allow_missing=True
    )


def test_a_split_bincount_is_pending():
    def run() -> tuple[object, list[int]]:
        mesh = init_device_mesh("cpu", (2,))
        counts = torch.bincount(distributed(NUMBERS, Layout(mesh, (5,), {0: (0,)})))
        return counts.placements, counts.full_tensor().tolist()

    assert simulate(run, 2) == [((Partial(),), [1, 0, 0, 3, 0, 0, 0, 1])] * 2


def test_a_bincount_with_weights_is_no_integer_where_a_rank_has_no_elements():
    def run() -> tuple[torch.dtype, list[float]]:
        mesh = init_device_mesh("cpu", (2,))
        layout = Layout(mesh, (1,), {0: (0,)})
        counts = torch.bincount(
            distributed(torch.tensor([2]), layout), distributed(torch.tensor([0.5]), layout)
        )
        return counts.dtype, counts.full_tensor().tolist()

    assert simulate(run, 2) == [(torch.float32, [0, 0, 0.5])] * 2


def test_unique():
    samples = [Sample(NUMBERS), Sample(NUMBERS, return_counts=True)]
    check_rule(torch.unique_consecutive, samples)
    check_rule(torch.unique, samples)
    check_rule(torch.Tensor.unique, [Sample(NUMBERS.view(5, 1), dim=0)])


def test_equal_and_allclose_give_every_rank_the_same_answer():
    other = X.detach().clone()
    other[0, 0] += 1  # only the first rank's piece differs

    def run() -> list[bool]:
        mesh = init_device_mesh("cpu", (2, 2))
        wrong = []
        for layout in layouts_of(X, mesh):
            x = distributed(X, layout)
            for theirs in (Layout(mesh, (5, 4), {0: (0,)}), Layout(mesh, (5, 4), {1: (0, 1)})):
                same, differs = distributed(X, theirs), distributed(other, theirs)
                if not layout.partial:
                    wrong.append(not torch.equal(x, same))
                wrong.append(torch.equal(x, differs))
                wrong.append(not torch.allclose(x, same))
                wrong.append(torch.allclose(x, differs))
            wrong.append(torch.equal(other, x))
            wrong.append(not torch.allclose(x, X))
            wrong.append(x.equal(X[:, :2]))
        return wrong

    for wrong in simulate(run, 4):
        assert not any(wrong)


def test_to_sort_a_split_dim_the_axis_goes_to_another_dim_by_one_exchange():
    def run(mesh):
        events, result = heard(mesh, lambda: in_layout(X, mesh, Shard(1)).sort(dim=1).values)
        return [event.kind for event in events], result.mesh_layout, result.full_tensor()

    for kinds, layout, found in ranks(run):
        assert kinds == ["all_to_all"]
        assert layout.placements == (Shard(0),)
        assert torch.equal(found, X.sort(dim=1).values)
