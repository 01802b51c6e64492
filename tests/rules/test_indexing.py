"""Reading by index: every kind of key, on every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.rules import leaf

from shardwise import Partial, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from shardwise.comm import Event, listen
from shardwise.dtensor.state import fallback
from shardwise.dtensor.tensor import DTensor
from shardwise.dtensor.writes import is_detached_copy
from shardwise.testing import Sample, check_rule


def at(key: Any) -> Any:
    def read(x: torch.Tensor) -> torch.Tensor:
        return x[key]

    read.__name__ = f"x[{key!r}]"
    return read


BASIC: list[Any] = [
    0,
    -1,
    slice(None),
    slice(1, 4),
    slice(None, None, 2),
    slice(-1, None),
    slice(4, 2),
    slice(-100, 100),
    None,
    ...,
    (1, 2),
    (slice(None), 1),
    (..., -1),
    (None, 2, None, slice(1, None)),
    (..., None),
    (slice(1, None, 3), slice(None, 2)),
    (slice(1, 4), 2, None),
    (..., ...),
    (),
]


@pytest.mark.parametrize("key", BASIC, ids=repr)
def test_basic_keys(key: Any) -> None:
    check_rule(at(key), [Sample(leaf(5, 4))], most=12, mesh_shapes=((3,), (2, 2)))


ADVANCED: list[Any] = [
    [0, 2],
    range(1, 4),
    np.array([3, -1, 0]),
    torch.tensor([[0, 4], [4, 1]]),
    torch.tensor(2),
    np.int64(3),
    (slice(None), [1, 1, 0]),
    ([0, 1, -1], [2, 0, 3]),
    (torch.tensor([[0], [2]]), torch.tensor([1, 0, 3])),
    (..., torch.tensor([1, 2])),
    (1, [2, 0]),
    ([2, 0], slice(1, 3)),
    (None, [0, 3]),
    [],
    True,
    False,
    (True, 1),
    torch.tensor([True, False, True, True, False]),
    (slice(None), [False, True, True, False]),
    torch.arange(20).reshape(5, 4) % 3 == 0,
]


@pytest.mark.parametrize("key", ADVANCED, ids=lambda key: repr(key).replace("\n", ""))
def test_keys_with_lists_arrays_and_tensors(key: Any) -> None:
    check_rule(at(key), [Sample(leaf(5, 4))], most=12, mesh_shapes=((3,), (2, 2)))


def test_tensors_apart_come_first() -> None:
    keys = [([0, 2], slice(None), [1, 0]), (slice(None), [0, 2], [1, 0]), ([1], 0, slice(None))]
    for key in [*keys, (0, slice(None), [1, 1])]:
        check_rule(at(key), [Sample(leaf(3, 4, 2))], most=12, mesh_shapes=((2, 2),))


def test_index_tensors_may_be_split() -> None:
    def read(x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return x[first]

    def both(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return x[first, second]

    index = torch.tensor([[0, 4, 2], [1, 1, -1]])
    check_rule(read, [Sample(leaf(5, 4), index)], most=25)
    check_rule(read, [Sample(torch.arange(5) > 2, index[0])], most=25)
    second = torch.tensor([3, 0, 1])
    check_rule(both, [Sample(leaf(5, 4), index, second)], most=25, mesh_shapes=((3,), (2, 2)))


def test_masks_may_be_split() -> None:
    def read(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x[mask]

    mask = torch.arange(20).reshape(5, 4) % 3 == 0
    check_rule(read, [Sample(leaf(5, 4), mask)], most=20, allow_missing=True)
    check_rule(read, [Sample(leaf(5, 4), mask[:, 0])], most=20, allow_missing=True)


def test_more_ranks_than_rows() -> None:
    index = torch.tensor([1, 0, 1])
    for key in (0, slice(1, None), index, (index, 1)):
        check_rule(at(key), [Sample(leaf(2, 3))], most=10, mesh_shapes=((4,),))


def test_a_row_of_bools_and_of_ints() -> None:
    for x in (torch.arange(6) % 2 == 0, torch.arange(6), torch.arange(6) + 1j):
        for key in (2, slice(1, 4), [5, 1]):
            check_rule(at(key), [Sample(x)], mesh_shapes=((4,),), allow_missing=True)


def run(fn: Any, size: int = 2) -> Any:
    return simulate(fn, size)[0]


def test_a_view_where_torch_gives_one() -> None:
    def main() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)])
        column = x[:, 1]
        assert column.placements == (Shard(0),)
        assert column.to_local().data_ptr() == x.to_local()[:, 1].data_ptr()
        assert x[1:, 0].placements == (Shard(0),)
        assert x[2:3].placements == (Replicate(),)
        assert is_detached_copy(x[1:, 0])
        assert not is_detached_copy(column)

    run(main)


def test_one_row_of_a_split_dim_sends_one_row() -> None:
    events: list[Event] = []

    def main() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.arange(400.0).reshape(100, 4), mesh, [Shard(0)])
        with listen(events.append):
            row = x[70]
        assert row.full_tensor().tolist() == [280.0, 281.0, 282.0, 283.0]

    run(main)
    assert [event.kind for event in events].count("all_reduce") == len(events)


def test_pending_sums_stay_pending() -> None:
    def main() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = DTensor.from_local(torch.ones(3, 2), mesh, [Partial()])
        for key in (0, slice(1, None), [0, 2], (..., None)):
            assert x[key].placements == (Partial(),)

    run(main)


def test_errors_are_torchs() -> None:
    def main() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)])
        plain = torch.zeros(4, 3)
        for key in (
            4,
            (0, 0, 0),
            slice(None, None, -1),
            torch.tensor([0, 4]),
            torch.tensor([0, -5]),
            torch.tensor([0.5]),
            torch.tensor([True]),
            (slice(None), [3]),
        ):
            with pytest.raises((IndexError, ValueError)) as theirs:
                plain[key]
            with pytest.raises(theirs.type):
                x[key]

    run(main)


def test_a_repeated_key_is_planned_once_and_data_never_counts() -> None:
    def main() -> None:
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(5.0)
        x = distribute_tensor(whole, mesh, [Shard(0)])
        with fallback("error"):
            for index in ([0, 1], [4, 2]):
                assert x[torch.tensor(index)].full_tensor().tolist() == index
            mask = torch.tensor([True, True, False, False, True])
            assert x[mask].full_tensor().tolist() == [0, 1, 4]
            assert x[~mask].full_tensor().tolist() == [2, 3]
            assert x[mask.int()].full_tensor().tolist() == [1, 1, 0, 0, 1]
            for stop in (2, 4):
                bound = distribute_tensor(torch.tensor(stop), mesh, [Replicate()])
                assert x[:bound].full_tensor().tolist() == list(range(stop))

    run(main)


def test_second_derivatives() -> None:
    def main() -> None:
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(5.0, dtype=torch.float64)
        x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
        for key in (3, slice(1, 4), [0, 0, 4]):
            y = x[key].full_tensor()
            (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad((first.full_tensor() ** 2).sum(), x)
            plain = whole.clone().requires_grad_()
            (want,) = torch.autograd.grad((plain[key] ** 3).sum(), plain, create_graph=True)
            (want,) = torch.autograd.grad((want**2).sum(), plain)
            torch.testing.assert_close(second.full_tensor(), want)

    run(main)
