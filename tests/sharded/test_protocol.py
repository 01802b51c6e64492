"""Sharded tensors as Python objects, and operators that users register for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.sharded_operators import all_specs, boxes, check, chunks, odd, on_ranks, values

import shardwise as sw
import shardwise.sharded as sh

X, Y = values(5, 4), values(5, 4, seed=1)
ROW = values(4, grad=False)
COUNTS = pytest.mark.parametrize("count", [2, 3, 4])


@COUNTS
def test_what_is_asked_of_values_is_asked_of_the_whole(count: int) -> None:
    def run() -> None:
        for name, spec in all_specs(count).items():
            tensor = spec.shard(X.detach())
            assert tensor.tolist() == X.tolist(), name
            assert (tensor.numpy() == X.detach().numpy()).all()
            assert X[2, 2].item() in tensor
            assert 1234.5 not in tensor
            with pytest.raises(RuntimeError, match="ambiguous"):
                bool(tensor)
            with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
                tensor.item()
        one = boxes((1, [0, 0], [1, 1])).shard(torch.tensor([[2.5]]))
        assert one.item() == float(one) == 2.5
        assert bool(one)
        assert int(boxes((0, [], [])).shard(torch.tensor(3))) == 3

    on_ranks(run, count)


def test_it_describes_itself_as_the_whole_tensor() -> None:
    def run() -> None:
        for name, spec in all_specs(2).items():
            tensor = spec.shard(X)
            assert (len(tensor), tensor.ndim, tensor.numel()) == (5, 2, 20), name
            assert tensor.shape == tensor.size() == (5, 4)
            assert tensor.size(-1) == 4
            assert tensor.stride() == (4, 1)
            assert tensor.is_contiguous()
            assert tensor.nbytes == 160
            assert not tensor.is_cuda
            assert tensor.layout == torch.strided
            assert tensor.type() == "torch.DoubleTensor"
            assert tensor.type(torch.float32).dtype == torch.float32
            assert torch.is_tensor(tensor) and isinstance(tensor, torch.Tensor)
            assert tensor.is_floating_point() and torch.is_floating_point(tensor)
            assert not tensor.data.requires_grad
            assert "reshard" in dir(tensor)
            assert (tensor == None) is False  # noqa: E711
            assert (tensor != None) is True  # noqa: E711
            assert {tensor: 1}[tensor] == 1
            assert tensor in {tensor}
            assert (tensor == tensor).full_tensor().all()
            assert tensor.new_zeros(3).tolist() == [0, 0, 0]
            assert tensor.new_ones(1, dtype=torch.int64).dtype == torch.int64

    on_ranks(run, 2)


@pytest.mark.parametrize("name", ["data_ptr", "storage", "untyped_storage", "storage_type"])
def test_memory_is_that_of_the_shards(name: str) -> None:
    def run() -> None:
        for spec in all_specs(2).values():
            with pytest.raises(sh.ShardedTensorError, match=r"x\.local_shards\(\)\[i\]\.tensor"):
                getattr(spec.shard(X.detach()), name)()

    on_ranks(run, 2)


def test_data_is_set_shard_by_shard() -> None:
    def run() -> None:
        for spec in all_specs(2).values():
            tensor, other = spec.shard(X), spec.shard(Y.detach())
            tensor.data = other
            torch.testing.assert_close(tensor.full_tensor(), Y)
            assert tensor.requires_grad
            with pytest.raises(sh.ShardedTensorError, match="the same shards"):
                tensor.data = Y.detach()
            tensor.data = other.float()
            assert tensor.dtype == torch.float32
            torch.testing.assert_close(tensor.full_tensor(), Y.float())

    on_ranks(run, 2)


# ---- what users register


@dataclass
class Rows(sh.ShardingSpec):
    """A user's own spec: two rows for each rank, the rest for the last."""

    def build_metadata(self, tensor_sizes: Any, tensor_properties: Any) -> Any:
        shards = [
            sh.ShardMetadata([0, 0], [2, tensor_sizes[1]], "rank:1/cpu"),
            sh.ShardMetadata([2, 0], [tensor_sizes[0] - 2, tensor_sizes[1]], "rank:0/cpu"),
        ]
        return sh.ShardedTensorMetadata(shards, torch.Size(tensor_sizes), tensor_properties)


def test_a_spec_of_the_user_s_own_works_throughout() -> None:
    check(lambda x: (x * 2).add_(ROW).exp() / x, [Rows()], [X], 2)

    def run() -> None:
        tensor = Rows().shard(X.detach())
        assert isinstance((tensor * 2).sharding_spec(), Rows)
        torch.testing.assert_close(sh.zeros(Rows(), 5, 4).full_tensor(), torch.zeros(5, 4))
        tensor.reshard(chunks(0, 0, 1)).reshard(Rows())
        torch.testing.assert_close(tensor.full_tensor(), X.detach())
        with pytest.raises(sh.ShardedTensorError, match=r"x\.reshard"):
            tensor.sum()

    on_ranks(run, 2)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.sharded.methods._for_all", {})
    monkeypatch.setattr("shardwise.sharded.methods._for_specs", {})


@pytest.mark.usefixtures("registry")
def test_operators_of_users_come_first_and_those_for_all_before_those_for_a_spec() -> None:
    @sh.custom_sharding_spec_op(sh.ShardingSpec, torch.sin)
    def of_all_specs(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        return "any spec", process_group

    @sh.custom_sharding_spec_op(sh.ChunkShardingSpec, torch.sin)
    def of_chunks(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        return "chunks", process_group

    def run() -> None:
        mesh = sw.DeviceMesh("cpu", [1, 0])
        chunked = chunks(0, 0, 1).shard(X)
        assert torch.sin(chunked) == ("chunks", sw.DeviceMesh("cpu", [0, 1]))
        assert torch.sin(odd(2)["bricks"].shard(X, process_group=mesh)) == ("any spec", mesh)
        assert torch.cos(chunked).shape == (5, 4)

    on_ranks(run, 2)

    @sh.custom_sharded_op_impl(torch.sin)
    @sh.custom_sharded_op_impl(torch.Tensor.size)
    @sh.custom_sharded_op_impl(torch.cat)
    def for_all(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        return "all", kwargs

    def run_again() -> None:
        chunked = chunks(0, 0, 1).shard(X)
        assert torch.sin(chunked, out=None) == ("all", {"out": None})
        assert chunked.size() == ("all", {})
        assert torch.cat([torch.ones(1), chunked], dim=0) == ("all", {"dim": 0})

    on_ranks(run_again, 2)


@pytest.mark.usefixtures("registry")
def test_operators_of_users_have_four_arguments() -> None:
    with pytest.raises(sh.ShardedTensorError, match=r"of \(types, args, kwargs, process_group\)"):
        sh.custom_sharded_op_impl(torch.sin)(lambda types, args: None)
    with pytest.raises(sh.ShardedTensorError, match="expected a class of specs"):
        sh.custom_sharding_spec_op(torch.Tensor, torch.sin)  # type: ignore[arg-type]
