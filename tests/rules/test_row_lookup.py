"""Indices and rows of a table split along one axis: ranks ask each other for rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import Partial, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from shardwise.comm import Event, listen
from shardwise.core import world
from shardwise.redistribute import cost

S0, S1, WHOLE, SUM = Shard(0), Shard(1), Replicate(), Partial()
ROWS = torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
INDICES = torch.tensor([[49, 0, 49], [1, 1, 49], [20, 49, 1], [30, 30, 30]])


@pytest.fixture
def no_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that bytes alone decide, as they do for large tensors."""
    bytes_only = sw.Costs(default=sw.AxisCost(0.0, 1e-9), start=1e-12)
    monkeypatch.setattr(cost, "LOOPBACK", bytes_only)


def heard(call: Any) -> tuple[Any, list[Event]]:
    """What a call returns, and the collectives of this rank within."""
    events: list[Event] = []
    with listen(events.append):
        result = call()
    return result, [event for event in events if event.rank == world.current().rank]


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


def check(
    mesh_shape: tuple[int, ...],
    of_indices: list[Any],
    of_rows: list[Any],
    expected: list[Any],
    indices: torch.Tensor = INDICES,
    rows: torch.Tensor = ROWS,
    lookup: Any = F.embedding,
    **options: Any,
) -> None:
    """Check that a lookup fetches rows, the layout of its result, its values and its gradients."""
    table = rows.clone().requires_grad_()
    alone = lookup(indices, table, **options)
    alone.pow(3).sum().backward()

    def run() -> None:
        mesh = init_device_mesh("cpu", mesh_shape)
        here = distribute_tensor(indices, mesh, of_indices)
        split = distribute_tensor(rows, mesh, of_rows).requires_grad_()
        found, events = heard(lambda: lookup(here, split, **options))
        assert kinds(events) == ["all_to_all"] * 3
        assert found.placements == tuple(expected)
        found.pow(3).sum().backward()
        torch.testing.assert_close(found.full_tensor(), alone)
        assert split.grad.placements == split.placements
        torch.testing.assert_close(split.grad.full_tensor(), table.grad)

    simulate(run, torch.Size(mesh_shape).numel())


@pytest.mark.usefixtures("no_latency")
@pytest.mark.parametrize("count", [2, 3])
def test_rows_come_from_those_who_have_them(count: int) -> None:
    check((count,), [S0], [S0], [S0])
    check((count,), [S1], [S0], [S1], padding_idx=49)
    check((count,), [S0], [S0], [S0], indices=INDICES.flatten().int())


@pytest.mark.usefixtures("no_latency")
def test_some_ranks_have_no_rows_or_no_indices() -> None:
    check((3,), [S0], [S0], [S0], indices=torch.tensor([1]), rows=ROWS[:2])
    check((3,), [S0], [S0], [S0], indices=INDICES[0, :1], padding_idx=-1)


@pytest.mark.usefixtures("no_latency")
@pytest.mark.parametrize(
    ("of_indices", "of_rows", "expected"),
    [
        ([S0, S0], [S0, S0], [S0, S0]),
        ([S1, S0], [S0, S0], [S1, S0]),
        ([S0, WHOLE], [S0, S0], [S0, SUM]),
        ([WHOLE, S0], [S0, S0], [SUM, S0]),
        ([S0, WHOLE], [S0, S1], [S0, Shard(2)]),
        ([S0, S1], [S0, WHOLE], [S0, S1]),
    ],
)
def test_the_other_axis_may_split_anything(
    of_indices: list[Any], of_rows: list[Any], expected: list[Any]
) -> None:
    check((2, 2), of_indices, of_rows, expected, padding_idx=1)


@pytest.mark.usefixtures("no_latency")
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_short_bags_ask_too(mode: str) -> None:
    bags = {"lookup": F.embedding_bag, "indices": INDICES[:, :2], "mode": mode}
    check((3,), [S0], [S0], [S0], **bags)
    check((3,), [S0], [S0], [S0], **bags, padding_idx=49)


@pytest.mark.usefixtures("no_latency")
def test_the_second_derivative() -> None:
    def penalty(indices: Any, weight: Any) -> Any:
        loss = F.embedding(indices, weight, padding_idx=1).pow(3).sum()
        (first,) = torch.autograd.grad(loss, weight, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weight)[0]

    def run() -> None:
        mesh = init_device_mesh("cpu", (3,))
        here = distribute_tensor(INDICES[:2], mesh, [S0])  # none on the last rank
        found = penalty(here, distribute_tensor(ROWS, mesh, [S0]).requires_grad_())
        expected = penalty(INDICES[:2], ROWS.clone().requires_grad_())
        torch.testing.assert_close(found.full_tensor(), expected)

    simulate(run, 3)


@pytest.mark.usefixtures("no_latency")
def test_each_row_travels_once_and_nothing_else() -> None:
    def run() -> tuple[list[int], list[int]]:
        mesh = init_device_mesh("cpu", (2,))
        weight = distribute_tensor(ROWS, mesh, [S0]).requires_grad_()
        indices = distribute_tensor(torch.tensor([25, 49, 25, 0, 30, 30, 49, 30]), mesh, [S0])
        found, there = heard(lambda: F.embedding(indices, weight))
        _, back = heard(found.to_local().sum().backward)
        return [event.bytes for event in there], [event.bytes for event in back]

    # The first rank asks for rows 25 and 49, of 32 bytes; the other one for none.
    assert simulate(run, 2) == [([8, 0, 64], [0]), ([8, 16, 0], [64])]


def chosen(count: int, rows: int, split: bool = True) -> tuple[Any, list[str]]:
    """How the result of a lookup of so many indices lies, in a table of so many long rows, and the
    collectives it takes."""

    def run() -> Any:
        mesh = init_device_mesh("cpu", (2,))
        weight = distribute_tensor(torch.zeros(rows, 1000), mesh, [S0])
        indices = torch.arange(count) % rows
        here = distribute_tensor(indices, mesh, [S0 if split else WHOLE])
        found, events = heard(lambda: F.embedding(here, weight))
        return found.placements[0], kinds(events)

    return simulate(run, 2)[0]  # type: ignore[no-any-return]


def test_the_cheapest_way_counts_what_asking_takes_and_what_sums_will() -> None:
    assert chosen(200, 1000) == (S0, ["all_to_all"] * 3)
    assert chosen(4, 1000) == (SUM, ["all_gather"])  # two collectives, where asking takes three
    assert chosen(200, 10) == (S0, ["all_gather"])  # the table is less than what is looked up
    assert chosen(200, 1000, split=False) == (SUM, [])


def test_one_ranks_wrong_index_is_refused_by_all() -> None:
    def run(wrong: int) -> str:
        mesh = init_device_mesh("cpu", (2,))
        weight = distribute_tensor(torch.zeros(1000, 1000), mesh, [S0])
        indices = torch.zeros(200, dtype=torch.long)
        indices[-1] = wrong
        here = distribute_tensor(indices, mesh, [S0])
        with pytest.raises(IndexError, match="from 0 to 999") as caught:
            F.embedding(here, weight)
        return str(caught.value)

    for wrong in (1000, -1):
        assert len(set(simulate(run, 2, wrong))) == 1


@pytest.mark.usefixtures("no_latency")
def test_indices_are_integers_that_torch_takes() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,))
        weight = distribute_tensor(ROWS, mesh, [S0])
        for placement in (S0, WHOLE):
            for dtype in (torch.double, torch.uint8):
                indices = distribute_tensor(INDICES.to(dtype), mesh, [placement])
                with pytest.raises(RuntimeError):
                    F.embedding(indices, weight)
                with pytest.raises(RuntimeError):
                    F.embedding_bag(indices, weight)

    simulate(run, 2)


@pytest.mark.usefixtures("no_latency")
def test_indices_and_rows_may_be_parts_of_others() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (3,))
        table = distribute_tensor(ROWS, mesh, [S0]).requires_grad_()
        indices = distribute_tensor(INDICES, mesh, [S0])
        rows, part = (table * 1)[1:], indices[1:]
        indices.clamp_(max=48)
        found = F.embedding(part, rows)
        torch.testing.assert_close(found.full_tensor(), ROWS[1 + INDICES[1:].clamp(max=48)])

    simulate(run, 3)


@pytest.mark.usefixtures("no_latency")
def test_nobody_asks_within_explicit() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,))
        here, weight = (distribute_tensor(each, mesh, [S0]) for each in (INDICES, ROWS))
        with sw.explicit(), pytest.raises(sw.PolicyError, match="would move between ranks"):
            F.embedding(here, weight)

    simulate(run, 2)


@pytest.mark.usefixtures("no_latency")
def test_without_values_a_sum_is_pending() -> None:
    mesh = sw.DeviceMesh.abstract((2,), ("tp",))
    here = distribute_tensor(INDICES.to("meta"), mesh, [S0])
    weight = distribute_tensor(ROWS.to("meta"), mesh, [S0])
    assert F.embedding(here, weight).placements == (SUM,)


@pytest.mark.usefixtures("no_latency")
def test_tensors_without_data_have_the_shapes() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,))
        here, weight = (distribute_tensor(x.to("meta"), mesh, [S0]) for x in (INDICES, ROWS))
        found = F.embedding(here, weight)
        assert found.shape == (4, 3, 4) and found.to_local().shape == (2, 3, 4)

    simulate(run, 2)
