"""embedding and embedding_bag on tables whose shards form no layout, or with a batch on a mesh."""

from typing import Any

import pytest
import torch
from support.sharded_operators import (
    all_specs,
    boxes,
    check,
    chunks,
    gradient,
    odd,
    on_ranks,
    values,
    whole,
)
from torch.nn import functional as F

import shardwise as sw
import shardwise.sharded as sh
from shardwise import Shard

COUNTS = pytest.mark.parametrize("count", [2, 3, 4])
X = values(5, 4)
INDICES = torch.tensor([4, 0, 3, 3, 1, 2])
BAGS: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "mean": {},
    "weights": {"mode": "sum", "per_sample_weights": values(6, seed=3, grad=False)},
    "padding": {"padding_idx": -2},
    "last offset": {"mode": "sum", "include_last_offset": True},
}


@COUNTS
@pytest.mark.parametrize("how", ["bricks", "one rank", "rows in turns"])
def test_rows_of_any_table(how: str, count: int) -> None:
    spec = odd(count)[how]
    check(lambda x: F.embedding(INDICES.view(2, 3), x), [spec], [X], count)
    check(lambda x: F.embedding(INDICES, x, padding_idx=-2), [spec], [X], count)
    check(lambda x: F.embedding(INDICES[:0], x), [spec], [X], count)


@COUNTS
@pytest.mark.parametrize("name", BAGS)
def test_bags_of_any_table(name: str, count: int) -> None:
    offsets = torch.tensor([0, 2, 2, 6] if name == "last offset" else [0, 2, 2])
    for spec in odd(count).values():
        check(lambda x: F.embedding_bag(INDICES, x, offsets, **BAGS[name]), [spec], [X], count)
    if name != "last offset":
        many = {
            key: each.view(3, 2) if isinstance(each, torch.Tensor) else each
            for key, each in BAGS[name].items()
        }
        check(lambda x: F.embedding_bag(INDICES.view(3, 2), x, **many), [spec], [X], count)


def test_weights_of_samples_have_the_whole_gradient_on_every_rank() -> None:
    alone = values(3, 2)
    F.embedding_bag(INDICES.view(3, 2), X, mode="sum", per_sample_weights=alone).sum().backward()

    def run() -> Any:
        table, scale = odd(3)["bricks"].shard(X.detach()), values(3, 2)
        bags = F.embedding_bag(INDICES.view(3, 2), table, mode="sum", per_sample_weights=scale)
        bags.sum().backward()
        return scale.grad

    for found in on_ranks(run, 3):
        torch.testing.assert_close(found, alone.grad)


@COUNTS
@pytest.mark.parametrize("lookup", [F.embedding, F.embedding_bag])
def test_each_rank_looks_up_its_part_of_a_batch(lookup: Any, count: int) -> None:
    batch = torch.arange(14).view(7, 2) % 5
    table = X.detach().clone().requires_grad_()
    expected = lookup(batch, table)
    expected.square().sum().backward()

    def run(name: str, spec: sh.ShardingSpec) -> Any:
        mesh = sw.init_device_mesh("cpu", (count,), ("dp",))
        mine = sw.distribute_tensor(batch, mesh, [Shard(0)])
        table = spec.shard(X.detach().clone().requires_grad_())
        result = lookup(mine, table)
        assert result.device_mesh == mesh
        if name != "columns":  # those are split by that axis already, and may stay so
            assert result.placements == (Shard(0),)
        result.square().sum().backward()
        return whole(result), gradient(table)

    for name, spec in all_specs(count).items():
        for found, grown in on_ranks(lambda name=name, spec=spec: run(name, spec), count):
            torch.testing.assert_close(found, expected.detach(), msg=name)
            torch.testing.assert_close(grown, table.grad, msg=name)


@pytest.mark.parametrize("how", ["one rank", "rows in turns"])
def test_rows_of_ones_own_part_come_from_those_who_have_them(how: str) -> None:
    batch = torch.arange(14).view(7, 2) % 5

    def run() -> list[int]:
        mine = sw.distribute_tensor(batch, sw.init_device_mesh("cpu", (2,)), [Shard(0)])
        table = odd(2)[how].shard(X.detach())
        heard: list[Any] = []
        with sw.listen(heard.append):
            F.embedding(mine, table)
        assert {event.kind for event in heard} == {"all_to_all"}
        return sum(event.bytes for event in heard if event.rank == table._group.rank)

    # Each rank needs all five rows: one number for the other, an index of 8 bytes and a row of 32
    # for each that the other has.
    assert sum(on_ranks(run, 2)) == 2 * 8 + 5 * (8 + 32)


def test_rows_of_truth_values_come_from_the_one_rank_that_has_them() -> None:
    table = torch.tensor([[True, False], [False, False], [True, True]])

    def run() -> Any:
        return F.embedding(torch.tensor([2, 0]), boxes((1, [0, 0], [3, 2])).shard(table))

    for found in on_ranks(run, 2):
        assert torch.equal(found, table[[2, 0]])


def test_no_lookup_moves_the_table() -> None:
    size = 1000

    def run(spec: sh.ShardingSpec, options: dict[str, Any]) -> int:
        table = sh.ones(spec, size, 4)
        heard: list[Any] = []
        with sw.listen(heard.append):
            F.embedding_bag(torch.tensor([[1, 999], [3, 0]]), table, **options)
        return sum(event.bytes for event in heard)

    uneven = boxes((0, [0, 0], [600, 4]), (1, [600, 0], [400, 4]))
    for spec in (chunks(0, 0, 1), uneven):
        for options in ({"mode": "sum"}, {"mode": "mean"}):
            for received in on_ranks(lambda s=spec, o=options: run(s, o), 2):
                assert 0 < received < 1000  # of 16,000 bytes


def test_an_index_that_is_no_row_is_refused_on_every_rank() -> None:
    def run() -> str:
        table = odd(3)["bricks"].shard(X.detach())
        with pytest.raises(IndexError, match="from 0 to 4") as caught:
            F.embedding(torch.tensor([0, 5]), table)
        return str(caught.value)

    assert len(set(on_ranks(run, 3))) == 1


def test_what_is_not_a_sum_says_what_to_reshard_to() -> None:
    def run() -> None:
        table = odd(3)["bricks"].shard(X.detach())
        bags = INDICES.view(3, 2)
        for options in ({"mode": "max"}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}):
            with pytest.raises(sh.ShardedTensorError, match=r"embedding_bag: needs .* x\.reshard"):
                F.embedding_bag(bags, table, **options)
        with pytest.raises(sh.ShardedTensorError, match=r"embedding: needs .* x\.reshard"):
            F.embedding(bags, table, max_norm=1.0)

    on_ranks(run, 3)


def test_gradients_of_tables_are_dense() -> None:
    def run() -> None:
        table = odd(3)["bricks"].shard(X.detach()).requires_grad_()
        rows = INDICES.view(3, 2)
        for lookup in (F.embedding, F.embedding_bag):
            with pytest.raises(sw.ShardwiseError, match=r"sparse gradient.*use sparse=False"):
                lookup(rows, table, sparse=True)
        with torch.no_grad():
            assert torch.equal(F.embedding(rows, table, sparse=True), X[rows])

    on_ranks(run, 3)


def test_of_many_shards_messages_name_the_first_and_the_last() -> None:
    def run() -> None:
        table = boxes(*((row % 2, [row, 0], [1, 4]) for row in range(50))).shard(torch.ones(50, 4))
        shown = "([ShardMetadata([0, 0], [1, 4], 'rank:0/cpu'), ..., "
        with pytest.raises(sh.ShardedTensorError) as caught:
            torch.linalg.svd(table)
        for text in (str(caught.value), repr(table)):
            assert shown in text and "'rank:1/cpu')]) of 50 shards" in text

    on_ranks(run, 2)


def test_shards_that_are_no_layout_on_the_mesh_of_a_dtensor_are_refused() -> None:
    def run() -> None:
        for mesh in (sw.init_device_mesh("cpu", (4,)), sw.init_device_mesh("cpu", (2, 2))):
            other = sw.distribute_tensor(X.detach(), mesh, [Shard(0)] * mesh.ndim)
            for spec in odd(4).values():
                x = spec.shard(X.detach())
                with pytest.raises(sh.ShardedTensorError, match="no layout there") as caught:
                    x + other
                advice = str(caught.value).split("; ")[-1]
                x = eval(advice.split(" makes")[0], {**vars(sh), "x": x})
                if mesh.ndim > 1:
                    assert "x.to_dtensor().redistribute(mesh, placements)" in advice
                    x = x.to_dtensor().redistribute(mesh, other.placements)
                torch.testing.assert_close(whole(x + other), 2 * X.detach())

    on_ranks(run, 4)
