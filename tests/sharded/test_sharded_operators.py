"""Torch functions on sharded tensors give the results and gradients of the whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.rules import heard
from support.sharded_operators import (
    all_specs,
    boxes,
    check,
    chunks,
    followed,
    gradient,
    layouts,
    odd,
    on_ranks,
    values,
    whole,
)

import shardwise as sw
import shardwise.sharded as sh
from shardwise import Replicate, Shard

X, Y = values(5, 4), values(5, 4, seed=1)
ROW = values(4, grad=False)
COUNTS = pytest.mark.parametrize("count", [2, 3, 4])

POINTWISE: dict[str, Callable[..., Any]] = {
    "number": lambda x: 2 * x + 1 - x / 3 + 1 / (x * x + 1),
    "row": lambda x: ROW * x + torch.ones(5, 1, dtype=torch.float64),
    "itself": lambda x: x * x.tanh(),
    "where": lambda x: torch.where(x > 0, x, torch.zeros(5, 4, dtype=torch.float64)),
    "masked": lambda x: x.masked_fill(x > 0, 0.0),
    "clamp": lambda x: x.clamp(-1, 1),
    "dtype": lambda x: (x > 0).to(torch.float64) * x,
    "float": lambda x: x.float().double(),
    "in place": lambda x: (x * 2).add_(ROW).mul_(x),
    "out": lambda x: torch.mul(x.detach(), 2, out=x.detach().clone()) * x,
    "clone": lambda x: x.clone().detach_() * x,
    "lerp": lambda x: torch.lerp(x, x.detach() + 1, 0.3),
    "contiguous": lambda x: x.contiguous() * 2,
    "frexp": lambda x: torch.frexp(x.detach()),
    "foreach": lambda x: torch._foreach_mul([x, x], 2.0),
}


@COUNTS
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_functions_work_however_the_tensor_is_cut(name: str, count: int) -> None:
    for spec in all_specs(count).values():
        check(POINTWISE[name], [spec], [X], count, differentiable=name != "frexp")


WHOLE: dict[str, Callable[..., Any]] = {
    "matmul": lambda x: x @ values(4, 3, grad=False),
    "matmul from the left": lambda x: values(2, 5, grad=False) @ x,
    "linear": lambda x: F.linear(values(3, 4, grad=False), x, values(5, grad=False)),
    "T": lambda x: x.T @ x,
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(0),
    "mean of columns": lambda x: x.mean(-1, keepdim=True),
    "max": lambda x: x.max(1),
    "argmax": lambda x: [x.argmax(), x.sum()],
    "norm": torch.linalg.vector_norm,
    "softmax": lambda x: x.softmax(0) * x.log_softmax(1),
    "layer norm": lambda x: F.layer_norm(x, (4,), ROW),
    "view": lambda x: x.view(20).reshape(4, 5),
    "unsqueeze": lambda x: x[None].transpose(1, 2),
    "index": lambda x: x[2],
    "slice": lambda x: x[1:4, ::2],
    "picked": lambda x: x[torch.tensor([4, 0, 0])],
    "cat": lambda x: torch.cat([x, 2 * x]),
    "stack": lambda x: torch.stack([x, x * x], dim=1),
    "split": lambda x: x.split([2, 3]),
    "iteration": lambda x: [row * 2 for row in x],
    "written": lambda x: _written(x * 2),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(1),
}


def _written(x: Any) -> Any:
    x[1] = 7.0
    x[:, 0] = x[:, 0] + 1
    return x


@COUNTS
@pytest.mark.parametrize("name", WHOLE)
def test_other_functions_work_on_shards_that_are_a_layout(name: str, count: int) -> None:
    for spec in layouts(count).values():
        check(WHOLE[name], [spec], [X], count)


@pytest.mark.parametrize("name", [each for each in WHOLE if each != "written"])
def test_other_functions_say_a_spec_that_works(name: str) -> None:
    specs = odd(3)

    def run() -> Any:
        results = []
        for spec in specs.values():
            tensor = spec.shard(X)
            with pytest.raises(sh.ShardedTensorError, match=r"x\.reshard") as caught:
                WHOLE[name](tensor)
            again = followed(str(caught.value), tensor)
            results.append(whole(WHOLE[name](again)))
        return results

    expected = whole(WHOLE[name](X))
    for results in on_ranks(run, 3):
        for result in results:
            torch.testing.assert_close(result, expected)


@COUNTS
def test_two_sharded_tensors_of_the_same_cut(count: int) -> None:
    for spec in all_specs(count).values():
        check(lambda x, y: x * y + torch.atan2(x, y), [spec, spec], [X, Y], count)


@COUNTS
def test_two_sharded_tensors_of_another_cut_on_ranks_in_one_order(count: int) -> None:
    rows, columns = chunks(0, *range(count)), chunks(1, *range(count))
    check(lambda x, y: x * y + x.T.T, [rows, columns], [X, Y], count)
    check(lambda x, y: x.T @ y, [rows, rows], [X, Y], count)
    check(lambda x, y: x @ y.T, [columns, columns], [X, Y], count)
    check(lambda x, y: torch.cat([x, y], 1), [columns, rows], [X, Y], count)


def test_tensors_whose_shards_lie_on_other_ranks_are_to_be_resharded() -> None:
    def run() -> Any:
        x, other = chunks(0, 1, 0).shard(X), chunks(1, 0, 1).shard(Y)
        with pytest.raises(sh.ShardedTensorError, match="different ranks") as caught:
            x * other
        advice = str(caught.value)
        assert f"ranks: {x.sharding_spec()} and {other.sharding_spec()}; " in advice
        eval(advice[advice.index("x.reshard(") :].split(" [rank")[0], {**vars(sh), "x": x})
        return (x * other).full_tensor()

    for result in on_ranks(run, 2):
        torch.testing.assert_close(result, X * Y)


def test_tensors_of_other_groups_are_refused() -> None:
    def run() -> None:
        rank = sw.DeviceMesh("cpu", [0, 1]).get_rank()
        alone = chunks(0, rank).shard(X, process_group=sw.DeviceMesh("cpu", [rank]))
        both = chunks(0, 0, 1).shard(X)
        with pytest.raises(sh.ShardedTensorError, match="expected sharded tensors of one process"):
            both + alone

    on_ranks(run, 2)


@COUNTS
def test_a_tensor_without_dims(count: int) -> None:
    one = torch.tensor(5.0, requires_grad=True)
    check(lambda x: (x * 2).exp() + x, [boxes((1, [], []))], [one], count)

    def run() -> Any:
        tensor = boxes((1, [], [])).shard(one.detach())
        return (tensor + torch.tensor(1.0, dtype=torch.float64)).dtype, tensor.add_(1).item()

    assert on_ranks(run, count) == [(torch.float64, 6.0)] * count


# ---- layers


@COUNTS
def test_both_halves_of_a_split_mlp(count: int) -> None:
    def mlp(up: Any, bias: Any, down: Any) -> Any:
        hidden = F.gelu(F.linear(values(3, 4, seed=5, grad=False), up, bias))
        return F.linear(hidden, down)

    everyone = range(count)
    specs = [chunks(0, *everyone), chunks(0, *everyone), chunks(1, *everyone)]
    check(mlp, specs, [values(6, 4), values(6), values(5, 6)], count)


INDICES = torch.tensor([4, 0, 3, 3, 1, 2])
BAGS: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "mean": {"mode": "mean"},
    "max": {"mode": "max"},
    "weights": {"mode": "sum", "per_sample_weights": values(6, seed=3, grad=False)},
    "padding": {"mode": "mean", "padding_idx": 3},
    "last offset": {"mode": "sum", "include_last_offset": True},
}


@COUNTS
@pytest.mark.parametrize("how", ["rows", "columns", "backwards", "pieces"])
def test_embedding(how: str, count: int) -> None:
    spec = layouts(count)[how]
    check(lambda x: F.embedding(INDICES.view(2, 3), x), [spec], [X], count)
    check(lambda x: F.embedding(INDICES, x, padding_idx=3), [spec], [X], count)


@COUNTS
@pytest.mark.parametrize("name", BAGS)
def test_embedding_bag(name: str, count: int) -> None:
    offsets = torch.tensor([0, 2, 2, 6] if name == "last offset" else [0, 2, 2])
    for how in ("rows", "columns"):
        spec = layouts(count)[how]
        check(lambda x: F.embedding_bag(INDICES, x, offsets, **BAGS[name]), [spec], [X], count)


def test_embedding_bag_of_bags_of_one_size() -> None:
    check(lambda x: F.embedding_bag(INDICES.view(3, 2), x), [chunks(0, 1, 0)], [X], 2)


@pytest.mark.parametrize("function", [F.embedding, F.embedding_bag])
def test_indices_that_differ_between_ranks_are_refused_on_all(function: Any) -> None:
    def run() -> str:
        rank = sw.DeviceMesh("cpu", [0, 1, 2]).get_rank()
        indices = torch.tensor([[0, 1], [2, 3 if rank == 2 else 4]])
        table = chunks(0, 0, 1, 2).shard(X)
        with pytest.raises(sw.ShardwiseError) as caught:
            function(indices, table)
        return str(caught.value)

    assert all("ranks [2]" in message for message in on_ranks(run, 3))


# ---- in place


@COUNTS
def test_in_place_functions_write_to_the_shards(count: int) -> None:
    def run() -> None:
        for name, spec in all_specs(count).items():
            tensor = spec.shard(X.detach())
            memory = [each.tensor.data_ptr() for each in tensor.local_shards()]
            result = tensor.add_(ROW).mul_(2).clamp_(min=0)
            assert result is tensor
            tensor[2] = 9.0
            tensor[:, 1] = ROW[0]
            tensor += 1
            tensor.fill_(3).zero_().sub_(ROW)
            expected = torch.zeros(5, 4, dtype=torch.float64) - ROW
            torch.testing.assert_close(tensor.full_tensor(), expected, msg=name)
            assert memory == [each.tensor.data_ptr() for each in tensor.local_shards()]

    on_ranks(run, count)


@COUNTS
def test_a_parameter_stays_one_when_it_is_written_to(count: int) -> None:
    def run() -> None:
        for name, spec in all_specs(count).items():
            tensor = spec.shard(X)
            with torch.no_grad():
                tensor.mul_(2)
                tensor[0] = 1.0
            assert tensor.requires_grad and tensor.is_leaf, name
            assert tensor.metadata().tensor_properties.requires_grad
            with pytest.raises(RuntimeError, match="leaf"):
                tensor.add_(1)

    on_ranks(run, count)


def test_what_is_written_may_bring_a_history() -> None:
    def write(x: Any) -> Any:
        result = (x * 1).detach()
        result.add_(x)
        assert result.requires_grad
        return result

    for spec in all_specs(3).values():
        check(write, [spec], [X], 3)


def test_views_share_memory_or_say_on_all_ranks_that_they_do_not() -> None:
    def run() -> None:
        tensor = chunks(0, 1, 2, 0).shard(X.detach())
        tensor[:, 1:3].view(5, 2).zero_()
        assert tensor.full_tensor()[:, 1:3].abs().sum() == 0
        pieces = layouts(3)["pieces"].shard(X.detach())
        for view in (pieces[:, 1:3], pieces.view(20), pieces.T, pieces.squeeze(), tensor[1:4]):
            for write in (lambda x: x.add_(1), lambda x: x.zero_(), lambda x: x.copy_(x.detach())):
                with pytest.raises(sw.ShardwiseError, match="writing to it would not reach"):
                    write(view)
        assert torch.equal(pieces, X.detach())

    on_ranks(run, 3)


def test_a_plain_tensor_is_not_written_to_with_a_rank_s_shard() -> None:
    def run() -> None:
        for name, spec in all_specs(2).items():
            plain = torch.zeros(5, 4, dtype=torch.float64)
            with pytest.raises(sw.ShardwiseError):
                plain.add_(spec.shard(X.detach()))
            assert not plain.any(), name

    on_ranks(run, 2)


# ---- beside DTensors


def test_beside_a_dtensor_the_result_is_a_dtensor() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        tensor = chunks(0, 0, 1).shard(X.detach())
        for placement in (Shard(0), Shard(1), Replicate()):
            other = sw.distribute_tensor(Y.detach(), mesh, [placement])
            for result in (tensor * other, other * tensor, torch.mul(other, tensor)):
                assert type(result) is sw.DTensor
                torch.testing.assert_close(result.full_tensor(), (X * Y).detach())
            assert type(torch.cat([other, tensor])) is sw.DTensor
            assert not torch.equal(other, tensor)
            assert torch.equal(tensor, sw.distribute_tensor(X.detach(), mesh, [placement]))
            tensor.clone().copy_(other)

    on_ranks(run, 2)


# ---- cost


def test_what_goes_shard_by_shard_does_not_communicate() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (3,))
        for spec in all_specs(3).values():
            tensor = spec.shard(X)
            events, _ = heard(mesh, lambda: ((tensor + tensor) * ROW).exp_().clone().detach_())  # noqa: B023
            assert events == []

    on_ranks(run, 3)


def test_inference_mode() -> None:
    def run() -> None:
        for name, spec in all_specs(3).items():
            outside = spec.shard(X.detach())
            with torch.inference_mode():
                for tensor in (outside, outside.clone()):
                    tensor.add_(1).mul_(2)
                    expected = (X.detach() + 1) * 2
                    torch.testing.assert_close(whole(tensor), expected, msg=name)
                    if name in layouts(3):
                        torch.testing.assert_close(whole(tensor.sum(0)), expected.sum(0), msg=name)

    on_ranks(run, 3)


def test_numbers_of_one_rank_promote_as_those_of_one_process() -> None:
    """The one element of a tensor of no dims is on one rank: no layout of several ranks."""
    number = values()

    def run() -> None:
        tensor = boxes((1, [], [])).shard(number)
        for function in (
            lambda x: x + 1,
            lambda x: x * x,
            lambda x: torch.tensor(2, dtype=torch.int64) * x,
            lambda x: x.float() * torch.tensor(2.0, dtype=torch.float64),
            lambda x: x.detach().clone().fill_(3),
        ):
            result = function(tensor)
            torch.testing.assert_close(whole(result), whole(function(number)))
            assert result.dtype == function(number).dtype
        (tensor * tensor).backward()
        torch.testing.assert_close(gradient(tensor), 2 * number.detach())

    on_ranks(run, 3)


def test_conversions_to_the_dtype_of_another_tensor() -> None:
    def run() -> None:
        tensor = sh.rand(chunks(0, 0, 1), 4, 3)
        wide = torch.ones(1, dtype=torch.float64)
        assert torch.Tensor.to(tensor, torch.float64).dtype == torch.float64
        assert tensor.type_as(wide).dtype == torch.float64
        assert wide.to(tensor).dtype == torch.float32
        assert not tensor.is_shared()

    sw.simulate(run, 2)
