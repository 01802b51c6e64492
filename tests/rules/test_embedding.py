"""Embeddings: indices, features and the vocabulary may be split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.rules import leaf

from shardwise import Partial, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from shardwise.comm import Event, listen
from shardwise.testing import Sample, check_rule

MESHES = ((3,), (2, 2))
INDICES = torch.tensor([[0, 4, 2], [1, 1, 4]])


def check(fn: Any, *samples: Sample, **options: Any) -> None:
    check_rule(fn, samples, **{"most": 16, "mesh_shapes": MESHES, **options})


def test_embedding() -> None:
    check(
        F.embedding,
        Sample(INDICES, leaf(5, 4)),
        Sample(INDICES, leaf(5, 4), 1),
        Sample(INDICES, leaf(5, 4), padding_idx=-1),
        Sample(torch.tensor(3), leaf(5, 4)),
        Sample(INDICES % 2, leaf(2, 3)),
    )
    # Of no indices a split of the vocabulary looks free, as nothing is looked up.
    check(F.embedding, Sample(INDICES[:, :0], leaf(5, 4)), allow_missing=True)
    check(torch.embedding, Sample(leaf(5, 4), INDICES), Sample(leaf(5, 4), INDICES, 4))
    check(torch.ops.aten.embedding.default, Sample(leaf(5, 4), INDICES))


def test_embedding_with_more_ranks_than_rows() -> None:
    check(F.embedding, Sample(INDICES % 2, leaf(2, 3)), mesh_shapes=((4,),))


@pytest.mark.parametrize("rows", [Replicate(), Shard(0)])
def test_the_second_derivative_where_ranks_have_no_indices(rows: Any) -> None:
    def penalty(indices: Any, weight: Any) -> Any:
        loss = F.embedding(indices, weight).pow(3).sum()
        (first,) = torch.autograd.grad(loss, weight, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weight)[0]

    def run() -> None:
        mesh = init_device_mesh("cpu", (3,))
        torch.manual_seed(0)
        indices, weight = torch.tensor([3, 1]), torch.randn(4, 2, dtype=torch.float64)
        here = distribute_tensor(indices, mesh, [Shard(0)])
        found = penalty(here, distribute_tensor(weight, mesh, [rows]).requires_grad_())
        expected = penalty(indices, weight.clone().requires_grad_())
        torch.testing.assert_close(found.full_tensor(), expected)

    simulate(run, 3)


def test_gradients_scaled_by_frequency() -> None:
    sample = Sample(INDICES, leaf(5, 4), scale_grad_by_freq=True)
    check(F.embedding, sample, allow_missing=True)


def test_rows_renormalized() -> None:
    def lookup(indices: torch.Tensor, weight: torch.Tensor) -> Any:
        weight = weight.clone()
        return F.embedding(indices, weight, max_norm=1.0, norm_type=1.5), weight

    weight = torch.randn(5, 4, dtype=torch.float64)
    check(lookup, Sample(INDICES, weight), rtol=1e-6)


def test_a_sparse_gradient_of_a_whole_weight_or_none() -> None:
    def main() -> None:
        mesh = init_device_mesh("cpu", (2,))
        weight = distribute_tensor(torch.ones(5, 2), mesh, [Replicate()]).requires_grad_()
        indices = distribute_tensor(torch.tensor([0, 3, 3]), mesh, [Shard(0)])
        F.embedding(indices, weight, sparse=True).sum().backward()
        assert weight.grad is not None and weight.grad.is_sparse
        for dim in (0, 1):
            split = weight.detach().redistribute(placements=[Shard(dim)]).requires_grad_()
            with pytest.raises(RuntimeError, match="use sparse=False"):
                F.embedding(indices, split, sparse=True)
            with torch.no_grad():
                found = F.embedding(indices, split, sparse=True)
            assert found.full_tensor().tolist() == [[1, 1]] * 3

    simulate(main, 2)


def test_a_split_vocabulary_is_pending_a_sum_and_sends_nothing() -> None:
    events: list[Event] = []

    def main() -> None:
        mesh = init_device_mesh("cpu", (2,))
        weight = distribute_tensor(torch.arange(5.0).reshape(5, 1), mesh, [Shard(0)])
        indices = distribute_tensor(torch.tensor([4, 0, 2]), mesh, [Replicate()])
        with listen(events.append):
            result = F.embedding(indices, weight)
        assert result.placements == (Partial(),)
        assert result.full_tensor().flatten().tolist() == [4, 0, 2]

    simulate(main, 2)
    assert [event.kind for event in events if event.kind == "all_gather"] == []


def test_indices_out_of_range_are_refused() -> None:
    def main() -> None:
        mesh = init_device_mesh("cpu", (2,))
        weight = distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)])
        for wrong in (5, -1):
            with pytest.raises(IndexError):
                F.embedding(torch.tensor([wrong]), weight)

    simulate(main, 2)


def test_an_embedding_module_trains_alike() -> None:
    def main() -> None:
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        plain = torch.nn.Embedding(5, 3, padding_idx=2)
        split = torch.nn.Embedding(5, 3, padding_idx=2)
        split.weight = torch.nn.Parameter(
            distribute_tensor(plain.weight.detach().clone(), mesh, [Shard(0)])
        )
        indices = torch.tensor([[0, 2], [4, 4]])
        plain(indices).square().sum().backward()
        split(indices).square().sum().backward()
        torch.testing.assert_close(split.weight.grad.full_tensor(), plain.weight.grad)

    simulate(main, 2)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(mode: str) -> None:
    check(
        F.embedding_bag,
        Sample(INDICES, leaf(5, 4), mode=mode),
        Sample(INDICES, leaf(5, 4), mode=mode, padding_idx=4),
        Sample(INDICES.flatten(), leaf(5, 4), torch.tensor([0, 2, 2]), mode=mode),
    )


def test_bags_of_weighted_rows() -> None:
    check(
        F.embedding_bag,
        Sample(INDICES, leaf(5, 4), mode="sum", per_sample_weights=leaf(2, 3)),
        Sample(
            INDICES.flatten(),
            leaf(5, 4),
            torch.tensor([0, 2, 6]),
            mode="sum",
            per_sample_weights=leaf(6),
            include_last_offset=True,
        ),
    )


def test_one_hot() -> None:
    check(F.one_hot, Sample(INDICES, 5), Sample(INDICES, num_classes=7))
    check(F.one_hot, Sample(INDICES), Sample(torch.tensor([3, 0])), allow_missing=True)
    check(F.one_hot, Sample(torch.tensor([1, 3])), mesh_shapes=((4,),), allow_missing=True)
