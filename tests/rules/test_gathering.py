"""Gathering and scattering along a dim, split or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.rules import leaf, split

from shardwise import (
    DispatchError,
    DTensor,
    Shard,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.comm import Event, listen
from shardwise.testing import Sample, check_rule

MESHES = ((3,), (2, 2))


def below(size: int, *shape: int) -> torch.Tensor:
    return torch.randint(size, shape, generator=torch.Generator().manual_seed(3))


def check(fn: Any, *samples: Sample, **options: Any) -> None:
    check_rule(fn, samples, **{"most": 7, "mesh_shapes": MESHES, **options})


def test_gather() -> None:
    check(
        torch.gather,
        Sample(leaf(5, 4), 0, below(5, 5, 4)),
        Sample(leaf(5, 4), 1, below(4, 5, 2)),
        Sample(leaf(5, 4), -1, below(4, 3, 6)),
        Sample(leaf(2, 3), 0, below(2, 5, 3)),
        Sample(leaf(5), 0, below(5, 3)),
        Sample(leaf(), 0, torch.tensor(0)),
        Sample(torch.arange(5) > 2, 0, below(5, 3)),
    )
    check(torch.gather, Sample(leaf(5, 4), 0, below(5, 5, 4)), mesh_shapes=((2,),), most=40)


def test_gather_of_nothing() -> None:
    check(torch.gather, Sample(leaf(5, 4), 0, below(5, 0, 4)))


def test_take_along_dim() -> None:
    check(
        torch.take_along_dim,
        Sample(leaf(5, 4), below(4, 5, 2), 1),
        Sample(leaf(5, 4), below(4, 1, 2), 1),
        Sample(leaf(1, 4), below(4, 5, 2), dim=-1),
        Sample(leaf(5, 4), below(20, 6)),
    )


def test_index_select() -> None:
    check(
        torch.index_select,
        Sample(leaf(5, 4), 0, below(5, 3)),
        Sample(leaf(5, 4), -1, below(4, 6)),
        Sample(leaf(2, 3, 2), 1, below(3, 4)),
        Sample(leaf(5, 4), 0, torch.tensor(2)),
    )


def test_take() -> None:
    check(torch.take, Sample(leaf(5, 4), torch.tensor([[0, 19, -1], [3, 3, 7]])), most=25)
    check(torch.take, Sample(leaf(2), below(2, 3)), mesh_shapes=((4,),))
    check(torch.take, Sample(leaf(5), torch.tensor(3)))


def inplace(name: str) -> Any:
    method = getattr(torch.Tensor, name)

    def write(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return method(x * 2, *args, **kwargs) * 3  # type: ignore[no-any-return]

    write.__name__ = name
    return write


ONCE = torch.tensor([[3, 0, 1, 4], [1, 2, 4, 0]])  # no place twice: which one wins is not defined


@pytest.mark.parametrize("fn", [torch.scatter, inplace("scatter_")])
def test_scatter(fn: Any) -> None:
    check(
        fn,
        Sample(leaf(5, 4), 0, ONCE, leaf(2, 4)),
        Sample(leaf(5, 4), 0, ONCE[:, :3], leaf(2, 3)),
        Sample(leaf(5, 4), 0, ONCE[:, :3], leaf(3, 4).detach()),
        Sample(leaf(5, 4), 0, ONCE, 7.5),
        Sample(leaf(4, 5), 1, ONCE.T[:2], leaf(2, 2)),
        Sample(leaf(2, 3), 0, torch.tensor([[1, 0, 1]]), leaf(1, 3)),
        allow_missing=True,
        most=10,
    )


@pytest.mark.filterwarnings("ignore:The reduce argument")
def test_scatter_with_a_reduction() -> None:
    x = torch.randn(5, 4, dtype=torch.float64)
    check(torch.scatter, Sample(x, 0, ONCE, x[:2], reduce="add"))


@pytest.mark.parametrize("fn", [torch.scatter_add, inplace("scatter_add_")])
def test_scatter_add(fn: Any) -> None:
    check(
        fn,
        Sample(leaf(5, 4), 0, below(5, 3, 4), leaf(3, 4)),
        Sample(leaf(5, 4), 1, below(4, 3, 6), leaf(3, 6)),
        Sample(leaf(5, 4), 1, below(4, 3, 6), leaf(4, 7).detach()),
        Sample(leaf(2), 0, below(2, 5), leaf(5)),
    )


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_scatter_reduce(reduce: str) -> None:
    for include_self in (True, False):
        sample = Sample(
            leaf(5, 4), 0, below(5, 3, 4), leaf(3, 4), reduce=reduce, include_self=include_self
        )
        check(torch.scatter_reduce, sample, most=10)
    sample = Sample(leaf(5, 4), 0, below(5, 3, 4), leaf(3, 4), reduce)
    check(inplace("scatter_reduce_"), sample, most=10)


@pytest.mark.parametrize("name", ["index_add", "index_copy"])
def test_writing_rows(name: str) -> None:
    samples = [
        Sample(leaf(5, 4), 0, torch.tensor([3, 0, 4]), leaf(3, 4)),
        Sample(leaf(5, 4), -1, torch.tensor([2, 1]), leaf(5, 2)),
        Sample(leaf(2, 3), 0, torch.tensor([1]), leaf(1, 3)),
    ]
    check(getattr(torch, name), *samples)
    check(inplace(name + "_"), *samples)


def test_a_plain_buffer_becomes_a_dtensor_that_is_split_as_the_rows_written_to_it() -> None:
    """So a cache of the global shape costs each rank its share."""
    rows = torch.arange(10.0).reshape(5, 2)
    expected = torch.zeros(5, 6).index_copy_(1, torch.tensor([1, 3]), rows)

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        buffer = torch.zeros(5, 6)
        assert buffer.index_copy_(1, torch.tensor([1, 3]), split(rows, mesh, Shard(0))) is buffer
        assert isinstance(buffer, DTensor) and buffer.placements == (Shard(0),)
        assert buffer.to_local().untyped_storage().nbytes() == buffer.to_local().numel() * 4
        assert torch.equal(buffer.full_tensor(), expected)

    simulate(program, 2)


def test_a_plain_tensor_that_others_see_keeps_its_shape_when_split_rows_are_written() -> None:
    """Neither a view nor a parameter is cut, nor a buffer along the dim of the rows."""
    at = torch.tensor([1, 3])

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        rows = split(torch.ones(4, 2), mesh, Shard(0))
        base = torch.zeros(2, 4, 6)
        computed = torch.zeros(4, 6).requires_grad_() * 1
        for target, dim, source in (
            (base[0], 1, rows),
            (computed, 1, rows),
            (torch.zeros(4, 6), 1, split(torch.ones(4, 2), mesh, Shard(1))),
        ):
            with pytest.raises(DispatchError, match="index_copy_: cannot write"):
                target.index_copy_(dim, at, source)
            assert not isinstance(target, DTensor) and target.shape == (4, 6)

    simulate(program, 2)


def test_adding_rows_twice_and_scaled() -> None:
    sample = Sample(leaf(5, 4), 0, torch.tensor([3, 3, 0]), leaf(3, 4), alpha=2)
    check(torch.index_add, sample)


@pytest.mark.parametrize("fn", [torch.index_fill, inplace("index_fill_")])
def test_index_fill(fn: Any) -> None:
    check(
        fn,
        Sample(leaf(5, 4), 0, torch.tensor([3, -1]), 7.5),
        Sample(leaf(5, 4), 1, torch.tensor([3, 0]), leaf()),
    )


def test_searches() -> None:
    sequence = torch.arange(5.0).double()
    values = torch.tensor([[0.5, 2.5, 3.5], [-1.0, 9.0, 1.5]], dtype=torch.float64)
    check(torch.searchsorted, Sample(sequence, values), Sample(sequence, values, right=True))
    check(torch.searchsorted, Sample(torch.stack([sequence, sequence * 2]), values))
    check(torch.searchsorted, Sample(sequence, 2.5), allow_missing=True)
    check(torch.searchsorted, Sample(sequence, values, sorter=torch.arange(5)), allow_missing=True)
    check(torch.bucketize, Sample(values, sequence), Sample(values, sequence, right=True))
    ints = torch.arange(6).reshape(2, 3)
    check(torch.isin, Sample(ints, torch.tensor([4, 1, 7])), allow_missing=True)
    check(torch.isin, Sample(ints, torch.tensor([4, 1, 7]), invert=True), allow_missing=True)
    check(torch.isin, Sample(ints, 3), Sample(3, ints), allow_missing=True)


def test_what_depends_on_data_is_whole() -> None:
    x = torch.tensor([[0, 3, 0], [5, 3, 0]])
    for fn in (torch.nonzero, torch.argwhere):
        check(fn, Sample(x), Sample(x > 0), allow_missing=True)
    check(torch.nonzero, Sample(x, as_tuple=True), allow_missing=True)
    check(torch.where, Sample(x > 0), allow_missing=True)
    check(
        torch.masked_select,
        Sample(leaf(2, 3), x > 0),
        Sample(leaf(3), x > 0),
        Sample(leaf(2, 3), x[0] > 0),
        allow_missing=True,
    )


@pytest.mark.parametrize("fn", [torch.masked_scatter, inplace("masked_scatter_")])
def test_masked_scatter(fn: Any) -> None:
    mask = torch.tensor([[False, True, False], [True, True, False]])
    check(
        fn,
        Sample(leaf(2, 3), mask, leaf(4)),
        Sample(leaf(2, 3), mask[1], leaf(2, 2)),
        allow_missing=True,
        allow_fallback=True,
    )


def test_indices_that_no_rank_holds_are_refused() -> None:
    def main() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
        for index in (torch.tensor([[4, 0, 0]]), torch.tensor([[0, -1, 0]])):
            with pytest.raises((IndexError, RuntimeError)):
                x.gather(0, index)
            with pytest.raises((IndexError, RuntimeError)):
                x.scatter(0, index, 1.0)

    simulate(main, 2)


def test_writing_to_split_rows_sends_nothing() -> None:
    events: list[Event] = []

    def main() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)])
        with listen(events.append):
            result = x.index_add(0, torch.tensor([4, 0, 4]), torch.ones(3, 2))
        assert result.placements == (Shard(0),)
        assert result.full_tensor()[:, 0].tolist() == [1, 0, 0, 0, 2]

    simulate(main, 2)
    assert events == []


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_scatter_with_an_index_of_one_row_writes_to_the_first_only(ranks: int, dim: int) -> None:
    index = torch.zeros((1, 4) if dim == 1 else (6, 1), dtype=torch.int64)
    plain = torch.arange(24.0, dtype=torch.float64).reshape(6, 4) / 7
    source = plain + 1
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x.scatter(dim, index, 3.0),
        lambda x: x.clone().scatter_(dim, index, 3.0),
        lambda x: x.scatter_add(dim, index, source),
        lambda x: x.scatter_reduce(dim, index, source, "amax"),
    ]

    def run() -> list[torch.Tensor]:
        x = distribute_tensor(plain, init_device_mesh("cpu", (ranks,)), [Shard(1 - dim)])
        return [call(x).full_tensor() for call in calls]  # type: ignore[attr-defined]

    for found in simulate(run, ranks):
        for have, call in zip(found, calls, strict=True):
            torch.testing.assert_close(have, call(plain))


def test_take_along_dim_takes_negative_indices() -> None:
    x = torch.arange(20.0, dtype=torch.float64).reshape(5, 4).requires_grad_()
    index = torch.tensor([[-1, 0, 2], [3, -4, 1], [0, 0, -2], [1, 2, 3], [-1, -1, 0]])
    check_rule(torch.take_along_dim, [Sample(x, index, 1)], allow_missing=True)
