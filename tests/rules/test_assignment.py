"""Writing by index: the target keeps its layout, both gradients are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.rules import leaf

from shardwise import Partial, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from shardwise.comm import Event, listen
from shardwise.core.errors import DispatchError
from shardwise.dtensor.tensor import DTensor
from shardwise.testing import Sample, check_rule


def to(key: Any) -> Any:
    def write(x: torch.Tensor, value: Any) -> torch.Tensor:
        result = x * 2
        result[key] = value
        return result * 3

    write.__name__ = f"x[{key!r}] ="
    return write


CASES: list[tuple[Any, tuple[int, ...]]] = [
    (0, (4,)),
    (-1, ()),
    (slice(1, 4), (3, 4)),
    (slice(1, 4), (4,)),
    (slice(None, None, 2), (3, 1)),
    (slice(4, 2), (4,)),
    ((slice(None), 1), (5,)),
    ((..., slice(2, None)), (5, 2)),
    ((1, 2), ()),
    ((1, slice(1, 3)), (1, 1, 2)),
    ((None, 3), (1, 4)),
    (slice(None), (5, 4)),
    ([0, 3], (2, 4)),
    ([0, -1], (4,)),
    ((slice(None), [3, 0]), (5, 2)),
    ((slice(None), [3, 0]), ()),
    (([0, 1, -1], [2, 0, 3]), (3,)),
    ((torch.tensor([[0], [2]]), torch.tensor([1, 0, 3])), (2, 3)),
    ((1, [2, 0]), (2,)),
    ((slice(1, 3), [-2, 0]), (2, 2)),
    (([2, 0], slice(1, 3)), (2, 2)),
    ((slice(None, None, 2), None, [1, 1 + 2]), (3, 1, 2)),
    (torch.tensor([True, False, True, True, False]), ()),
    (torch.tensor([True, False, True, True, False]), (4,)),
    (torch.tensor([True, False, True, True, False]), (3, 4)),
    (torch.arange(20).reshape(5, 4) % 3 == 0, ()),
    (torch.arange(20).reshape(5, 4) % 3 == 0, (7,)),
    (True, (5, 4)),
]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("key, shape", CASES, ids=lambda each: repr(each).replace("\n", ""))
def test_every_key_with_every_layout(key: Any, shape: tuple[int, ...]) -> None:
    check_rule(
        to(key),
        [Sample(leaf(5, 4), leaf(*shape))],
        most=10,
        mesh_shapes=((3,), (2, 2)),
        allow_missing=True,
    )


@pytest.mark.parametrize("key", [0, slice(1, 3), (slice(None), 1), [0, 2]], ids=repr)
def test_a_number_counts_once_also_in_a_pending_sum(key: Any) -> None:
    check_rule(to(key), [Sample(leaf(5, 4), 7.5)], most=10, allow_missing=True)


def test_more_ranks_than_rows() -> None:
    for key, shape in ((0, (3,)), (slice(1, None), (1, 3)), ([1, 0], (2, 3))):
        check_rule(
            to(key), [Sample(leaf(2, 3), leaf(*shape))], most=10, mesh_shapes=((4,),),
            allow_missing=True,
        )  # fmt: skip


def test_a_value_that_requires_grad_in_a_target_that_does_not() -> None:
    def write(value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        result = x * 1
        result[1] = value
        return result

    check_rule(write, [Sample(leaf(4), torch.randn(5, 4, dtype=torch.float64))], allow_missing=True)


def test_masks_may_be_split() -> None:
    def write(x: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
        result = x * 2
        result[mask] = value
        return result

    mask = torch.arange(20).reshape(5, 4) % 3 == 0
    for value in (0.5, leaf(), leaf(7)):
        check_rule(write, [Sample(leaf(5, 4), mask, value)], most=10, allow_missing=True)


def test_index_put_and_put() -> None:
    index = torch.tensor([0, 4, 0])
    second = torch.tensor([3, 1, 3])
    samples = [
        Sample(leaf(5, 4), (index,), leaf(3, 4), accumulate=True),
        Sample(leaf(5, 4), (index, second), leaf(3), accumulate=True),
        Sample(leaf(5, 4), (torch.arange(5) > 2,), leaf(2, 4)),
    ]
    check_rule(torch.index_put, samples, most=12, mesh_shapes=((3,), (2, 2)), allow_missing=True)
    for accumulate in (False, True):
        sample = Sample(leaf(5, 4), (None, second[:2]), leaf(5, 2), accumulate)
        check_rule(torch.ops.aten.index_put, [sample], most=12, allow_missing=True)
    samples = [
        Sample(leaf(5, 4), torch.tensor([0, 19, -3]), leaf(3)),
        Sample(leaf(5, 4), torch.tensor([[7, 7]]), leaf(1, 2), accumulate=True),
    ]
    check_rule(torch.Tensor.put, samples, most=12, mesh_shapes=((3,), (2, 2)), allow_missing=True)

    def added(x: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return (x * 2).index_put_((index,), values, accumulate=True)

    check_rule(added, [Sample(leaf(5, 4), index, leaf(3, 4))], most=20, allow_missing=True)


def run(fn: Any, size: int = 2) -> None:
    simulate(fn, size)


def test_the_target_keeps_its_layout_and_nothing_is_sent_for_a_whole_value() -> None:
    events: list[Event] = []

    def main() -> None:
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(12.0).reshape(4, 3)
        x = distribute_tensor(whole, mesh, [Shard(0)])
        mask = x.redistribute(placements=[Shard(0)])
        mask = DTensor.from_local(mask.to_local() > 5, mesh, [Shard(0)], shape=(4, 3))
        with listen(events.append):
            x[1:3] = torch.full((2, 3), -1.0)
            x[mask] = 0
            x[:, 2] = 8
            x[[0, 3], [0, 0]] = 9.0
        assert x.placements == (Shard(0),)
        whole[1:3] = -1
        whole[torch.arange(12).reshape(4, 3) > 5] = 0
        whole[:, 2] = 8
        whole[[0, 3], [0, 0]] = 9
        assert x.full_tensor().tolist() == whole.tolist()

    run(main)
    assert events == []


def test_writing_to_a_view_changes_what_it_is_a_view_of() -> None:
    def main() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
        x[:, 1][2] = 5
        assert x.full_tensor()[2].tolist() == [0, 5, 0]

    run(main)


def test_writing_to_a_copy_where_torch_has_a_view_is_written_back() -> None:
    def main() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x, plain = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)]), torch.zeros(4, 3)
        for key in (1, slice(1, 4)):
            for each in (x, plain):
                part = each[key]
                part[0] = 1.0
        assert torch.equal(x.full_tensor(), plain)

    run(main)


def test_what_torch_refuses_is_refused() -> None:
    def main() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
        for key, value in (
            (0, torch.ones(2)),
            (slice(2), torch.ones(3, 3)),
            ([0], torch.ones(2, 2)),
        ):
            with pytest.raises(RuntimeError):
                x[key] = value
        with pytest.raises(IndexError):
            x[4] = 1
        for key in ([4], (slice(1, 3), [3]), (slice(1, 3), [-4]), ([-5], slice(1, 3))):
            with pytest.raises(IndexError):
                x[key] = 1.0
        with pytest.raises(TypeError, match="can't assign a list"):
            x[0] = [1.0, 2.0, 3.0]
        with pytest.raises(DispatchError, match="plain tensor"):
            torch.zeros(4)[:] = x[:, 0]
        x.requires_grad_()
        with pytest.raises(RuntimeError, match="leaf"):
            x[0] = 1.0

    run(main)


def test_a_pending_maximum_is_made_whole_first() -> None:
    def main() -> None:
        mesh = init_device_mesh("cpu", (2,))
        local = torch.arange(3.0) * (1 + mesh.get_coordinate()[0])
        x = DTensor.from_local(local, mesh, [Partial("max")])
        x[0] = -1.0
        assert x.full_tensor().tolist() == [-1, 2, 4]

    run(main)


def test_replicated_stays_replicated() -> None:
    def main() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.zeros(4), mesh, [Replicate()])
        x[1:3] = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
        assert x.placements == (Replicate(),)
        assert x.to_local().tolist() == [0, 1, 1, 0]

    run(main)


def test_an_indexed_row_of_a_split_dim_is_written_to() -> None:
    def main() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.arange(1.0, 11.0).reshape(5, 2), mesh, [Shard(0)])
        x[1] += 1
        assert x[1].tolist() == [4.0, 5.0]

    run(main)


@pytest.mark.parametrize("accumulate", [True, False])
def test_put_into_a_number(accumulate: bool) -> None:
    sample = Sample(torch.tensor(2.0).double(), torch.tensor(0), torch.tensor(5.0).double())
    check_rule(lambda x, i, v: x.put(i, v, accumulate), [sample], allow_missing=True)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_is_written_to_another_place_or_to_the_same_of_another_tensor(dim: int) -> None:
    """Only the assignment that ends `x[key] += 1` has nothing left to write."""
    whole = torch.arange(24.0).reshape(4, 6)

    def main() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x, y = (distribute_tensor(each, mesh, [Shard(dim)]) for each in (whole, -whole))
        want = whole.clone()
        x[1], want[1] = x[0], want[0]
        x[2:4], want[2:4] = x[0:2], want[0:2]
        x[0], want[0] = y[0], -whole[0]
        assert torch.equal(x.full_tensor(), want)

    run(main)
