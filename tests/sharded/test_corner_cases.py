"""Cases that random programs found: empty shards, tensors of no dims, plain tensors beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.sharded_operators import boxes, on_ranks, values
from support.sharded_tensors import chunks, refusal

import shardwise as sw
import shardwise.sharded as sh

ROWS = chunks(0, 0, 1)
ALONE = boxes((1, [], []))
"""A tensor of no dims, held by rank 1."""
TABLE = boxes((1, [0], [4]))
"""Four elements, held by rank 1."""


def number(value: float = 3.0, grad: bool = False) -> Any:
    return ALONE.shard(torch.tensor(value, requires_grad=grad))


def test_shards_of_no_elements_beside_others_get_gradients_too() -> None:
    spec = boxes((0, [0, 0], [2, 2]), (0, [2, 0], [0, 2]), (1, [2, 0], [2, 2]), (1, [0, 0], [0, 1]))
    data = values(4, 2)

    def run() -> Any:
        x = spec.shard(data.detach().clone().requires_grad_())
        x.exp().sum().backward()
        return x.grad.full_tensor()

    for found in on_ranks(run, 2):
        torch.testing.assert_close(found, data.detach().exp())


@pytest.mark.parametrize(
    "change", [lambda x, y: x.sub_(y), lambda x, y: x.mul_(y), lambda x, y: x.copy_(y)]
)
def test_numbers_that_are_changed_in_place_have_their_history_on_all_ranks(change: Any) -> None:
    alone = torch.tensor(2.0, requires_grad=True)
    change(torch.tensor(3.0, requires_grad=True) * 1, alone).backward()

    def run() -> Any:
        y = number(2.0, grad=True)
        change(number(grad=True) * 1, y).backward()
        return y.grad.full_tensor()

    assert on_ranks(run, 2) == [alone.grad] * 2


def test_a_leaf_of_no_dims_is_not_changed_in_place_on_any_rank() -> None:
    told = on_ranks(lambda: refusal(lambda: number(grad=True).add_(1), RuntimeError), 2)
    assert all("leaf" in each for each in told)


@pytest.mark.parametrize("spec", [ROWS, TABLE])
def test_numbers_beside_other_shards_are_taken_whole(spec: Any) -> None:
    data = torch.arange(4.0)

    def run() -> None:
        scale = number(grad=True)
        x = spec.shard(data)
        assert torch.equal((x * scale).detach().full_tensor(), data * 3)
        (x * scale).backward(torch.ones(4))
        assert scale.grad.full_tensor() == data.sum()
        assert torch.equal(x.clamp(max=number(1.0)).full_tensor(), data.clamp(max=1))
        x[0] = number(7.0)
        assert x.full_tensor()[0] == 7
        assert torch.equal(number().cumsum(0), torch.tensor(3.0))

    on_ranks(run, 2)


@pytest.mark.parametrize("spec", [ROWS, TABLE])
def test_tensors_take_smaller_ones(spec: Any) -> None:
    def run() -> None:
        x = spec.shard(torch.zeros(4))
        x.copy_(number())
        assert x.full_tensor().tolist() == [3] * 4
        value = torch.tensor(2.0, requires_grad=True)
        filled = spec.shard(torch.zeros(4)).fill_(value)
        filled.backward(torch.ones(4))
        assert filled.requires_grad and value.grad == 4
        plain = torch.zeros(2)
        assert plain.fill_(number()).tolist() == [3, 3]
        assert "broadcasts" in refusal(lambda: x.copy_(torch.zeros(3)))
        assert "0 dims" in refusal(lambda: x.fill_(torch.zeros(1)))

    on_ranks(run, 2)


def test_plain_tensors_are_converted_to_what_a_sharded_one_is() -> None:
    def run() -> None:
        x = ROWS.shard(torch.zeros(4, dtype=torch.float16))
        plain = torch.ones(3).to(x)
        assert type(plain) is torch.Tensor and plain.dtype == torch.float16

    on_ranks(run, 2)


@pytest.mark.parametrize("spec", [ROWS, TABLE])
def test_what_would_be_written_to_a_plain_tensor_is_refused_with_a_way_that_works(
    spec: Any,
) -> None:
    def run() -> None:
        x, plain = spec.shard(torch.arange(4.0)), torch.ones(4)
        for write in (
            lambda: plain.add_(x),
            lambda: torch.exp(x, out=plain),
            lambda: plain.__setitem__(x > 0, 2.0),
        ):
            assert "plain.copy_(result)" in refusal(write)
        plain.copy_(plain + x)
        assert plain.tolist() == [1, 2, 3, 4]
        message = refusal(lambda: setattr(x, "grad", plain))
        assert "torch.zeros_like(x).copy_(value)" in message
        x.grad = torch.zeros_like(x).copy_(plain)
        assert x.grad.full_tensor().tolist() == plain.tolist()

    on_ranks(run, 2)


def test_the_norm_of_shards_that_are_no_layout_by_torchs_old_name() -> None:
    def run() -> float:
        return torch.norm(TABLE.shard(torch.arange(4.0)), p=2).item()

    assert on_ranks(run, 2) == [torch.norm(torch.arange(4.0)).item()] * 2


def test_results_are_not_cast_down_to_what_they_are_written_to() -> None:
    def run() -> str:
        x = TABLE.shard(torch.arange(4.0))
        out = torch.zeros_like(x, dtype=torch.int64)
        return refusal(lambda: torch.mul(x, 0.5, out=out), RuntimeError)

    assert all("can't be cast" in each for each in on_ranks(run, 2))


def test_dtypes_that_torch_refuses_are_refused_by_ranks_that_hold_nothing_too() -> None:
    def run() -> Any:
        x = chunks(0, 1, 0).shard(torch.zeros(1, 2, dtype=torch.complex64))
        return refusal(lambda: x.mode(1), NotImplementedError), (x + 1).sum().item()

    assert all("ComplexFloat" in told and total == 2 for told, total in on_ranks(run, 2))


@pytest.mark.parametrize("spec", [TABLE, ROWS])
def test_python_functions_are_applied_to_each_element(spec: Any) -> None:
    def run() -> Any:
        x = spec.shard(torch.arange(4.0))
        return x.apply_(lambda value: value + 1) is x, x.full_tensor().tolist()

    assert on_ranks(run, 2) == [(True, [1, 2, 3, 4])] * 2


def test_a_number_is_turned_as_torch_does() -> None:
    assert on_ranks(lambda: number().flip([0]).item(), 2) == [3.0] * 2


def test_tensors_of_the_same_ranks_go_together_in_whatever_order_a_mesh_has_them() -> None:
    def run() -> Any:
        x = chunks(0, 1, 0).shard(torch.arange(4.0))
        y = sh.from_dtensor(x.to_dtensor())  # on a mesh of ranks 1 and 0
        z = chunks(0, 0, 1).shard(torch.arange(4.0), process_group=sw.DeviceMesh("cpu", [1, 0]))
        return torch.equal(x + y, y * 2), x.copy_(z * 2).full_tensor().tolist()

    assert on_ranks(run, 2) == [(True, [0, 2, 4, 6])] * 2


def test_sizes_are_compared() -> None:
    def run() -> Any:
        x, others = TABLE.shard(torch.arange(4.0)), [torch.ones(4), torch.ones(3)]
        answers = [(x.is_same_size(each), torch.is_same_size(each, x)) for each in others]
        return x.is_same_size(x), *answers

    assert on_ranks(run, 2) == [(True, (True, True), (False, False))] * 2


def test_a_tensor_is_gathered_into_memory_of_its_own_shards() -> None:
    spec = boxes((0, [0], [2]), (0, [2], [2]), (1, [4], [2]))

    def run() -> Any:
        x = spec.shard(torch.arange(6.0))
        if x._group.rank:
            return x.gather(0)
        out = torch.tensor([2.0, 3, 0, 1, -1, -1])
        first, second = x.local_shards()
        first.tensor, second.tensor = out[2:4], out[:2]
        x.gather(0, out)
        return out.tolist()

    assert on_ranks(run, 2) == [[0, 1, 2, 3, 4, 5], None]


def test_what_cannot_be_written_to_is_refused_after_all_have_taken_part() -> None:
    def run() -> Any:
        x = ROWS.shard(torch.arange(4.0))
        if x._group.rank:
            return x.gather(0)
        return refusal(lambda: x.gather(0, torch.zeros(1).expand(4)), RuntimeError)

    told, nothing = on_ranks(run, 2)
    assert told and nothing is None
