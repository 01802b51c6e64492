"""The memory of a shard is handed out only where the shard is the whole tensor.

tests/dtensor/test_other_code.py walks the list of calls; this is about what they give.
"""

import copy
import warnings

import pytest
import torch
from support.refusals import refused
from support.rules import full, ranks, split
from torch import nn

import shardwise as sw
from shardwise import Layout, Partial, Replicate, Shard
from shardwise.torch_internals import as_local


@pytest.mark.parametrize(
    ("placements", "is_whole"),
    [
        ((Replicate(), Replicate()), True),
        ((Replicate(), Shard(0)), True),
        ((Replicate(), Partial()), True),
        ((Shard(0), Replicate()), False),
        ((Partial(), Replicate()), False),
        ((Shard(1), Shard(1)), False),
    ],
)
def test_a_layout_is_whole_if_only_axes_of_one_rank_split_it(placements, is_whole):
    def run(mesh):
        # One row: the first rank holds it, and yet the tensor is split.
        assert Layout.from_placements(mesh, (1, 4), placements).is_whole is is_whole

    ranks(run, shape=(2, 1))


def test_within_as_local_every_call_goes_on():
    def run(mesh):
        x = split(full(3, 2), mesh, Shard(0))
        local = x.to_local()
        with as_local():
            assert x.data_ptr() == local.data_ptr()
            assert x.untyped_storage().nbytes() == local.nbytes
            assert x.storage().size() == local.numel()
            made = [torch.Tensor(x), torch.tensor(x.detach().clone()), torch.as_tensor(x.double())]
            assert all(each.shape == local.shape for each in made)
            assert type(x.as_subclass(torch.Tensor)) is torch.Tensor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of typed storages and of torch.tensor(tensor)
        ranks(run)


def test_a_refusal_names_the_call_the_piece_the_layout_and_the_remedies():
    def run(mesh):
        x = split(full(3, 2), mesh, Shard(0))
        with pytest.raises(sw.DispatchError) as caught:
            x.data_ptr()
        rows = 2 - mesh.get_rank()
        for part in ("data_ptr", f"({rows}, 2)", "[3@0, 2]", "to_local()", "full_tensor()"):
            assert part in str(caught.value)

    ranks(run)


def test_the_memory_of_a_copy_that_emulates_a_view_is_up_to_date():
    def run(mesh):
        x = split(full(3, 2), mesh, Shard(0))
        row = x[2]
        x.add_(10)
        assert row.mesh_layout.is_whole
        assert row.untyped_storage().nbytes() == 8
        assert torch.Tensor(row).tolist() == [15, 16]

    ranks(run)


def test_torch_tensor_copies_without_history_and_as_tensor_converts_with_it():
    def run(mesh):
        x = split(full(3, 2), mesh, Shard(0)).requires_grad_()
        made = torch.tensor(data=x, dtype=torch.float64, requires_grad=True)
        assert made.is_leaf and made.requires_grad and made.dtype is torch.float64
        assert made.mesh_layout is x.mesh_layout
        with torch.no_grad():
            made.zero_()
        assert torch.equal(x.full_tensor(), full(3, 2))
        assert not torch.tensor(x).requires_grad
        converted = torch.as_tensor(x, dtype=torch.float64)
        (converted * converted).sum().backward()
        assert torch.equal(x.grad.full_tensor(), 2 * full(3, 2))
        assert torch.as_tensor(x) is x
        assert torch.as_tensor(x, torch.float32, "cpu") is x

    ranks(run)


def test_torch_asarray_shares_memory_or_copies_as_it_is_told():
    def run(mesh):
        x = split(full(3, 2), mesh, Shard(0)).requires_grad_()
        assert torch.asarray(x) is x
        assert torch.asarray(x, copy=True).requires_grad
        detached = torch.asarray(x, requires_grad=False)
        assert not detached.requires_grad
        detached.zero_()
        assert not x.full_tensor().any()
        with pytest.raises(ValueError, match="can't alias"):
            torch.asarray(x, dtype=torch.float64, copy=False)

    ranks(run)


def test_new_tensor_of_a_plain_tensor_takes_its_dtype():
    def run(mesh):
        x = split(full(3, 2), mesh, Shard(0))
        made = torch.ones(1, dtype=torch.int64).new_tensor(x)
        assert made.dtype is torch.int64
        assert torch.equal(made.full_tensor(), full(3, 2).long())
        assert torch.ones(1).new_tensor(x, dtype=torch.float64).dtype is torch.float64

    ranks(run)


def test_a_number_for_a_constructor_is_the_sum_and_keeps_its_kind():
    def run(mesh):
        total = split(torch.arange(5), mesh, Shard(0)).sum()
        assert total.mesh_layout.partial
        assert torch.full((2,), fill_value=total).tolist() == [10, 10]
        assert torch.full((2,), total).dtype is torch.int64
        assert torch.arange(total - 3, total).tolist() == [7, 8, 9]
        with pytest.raises(TypeError):  # as torch
            torch.full((2,), split(full(4), mesh, Shard(0)).requires_grad_().sum())

    ranks(run)


def test_consumers_of_dlpack_that_ask_for_c_functions_find_none():
    assert hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert not hasattr(sw.DTensor, "__dlpack_c_exchange_api__")


def test_share_memory_keeps_the_tensor():
    def run(mesh):
        x = split(full(3, 2), mesh, Shard(0))
        assert x.share_memory_() is x and x.is_shared()
        assert torch.equal(x.full_tensor(), full(3, 2))

    ranks(run)


def test_a_plain_tensor_does_not_take_the_memory_of_a_piece():
    def run(mesh):
        plain, x = torch.ones(2), split(full(4), mesh, Shard(0))
        for take in (plain.set_, plain.new, torch.Tensor):
            with pytest.raises(sw.DispatchError, match="this rank's piece"):
                take(x)
        with refused("set_"):
            torch.Tensor.set_(x, plain)
        assert plain.tolist() == [1, 1]

    ranks(run)


def test_a_scripted_function_gets_whole_tensors_also_in_lists_and_by_name():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.script is deprecated
        scripted = torch.jit.script(_sum_of_first)

    def run(mesh):
        x = split(full(3, 2), mesh, Shard(0))
        with sw.fallback("replicate"):
            assert scripted([x, x], scale=2.0).item() == 42
            assert scripted([full(3, 2)], 2.0).item() == 42

    ranks(run)


def _sum_of_first(tensors: list[torch.Tensor], scale: float) -> torch.Tensor:
    return tensors[0].sum() * scale


def test_models_of_dtensors_are_copied_moved_and_stepped_as_before():
    def run(mesh):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.LSTM(3, 2), nn.Identity())
        sw.parallel.shard_module(model[0], mesh, {"weight": {mesh.mesh_dim_names[0]: Shard(0)}})
        again = copy.deepcopy(model).to(torch.float64).share_memory()
        assert torch.equal(
            again[0].weight.full_tensor(), model[0].weight.full_tensor().to(torch.float64)
        )

    sw.simulate(lambda: run(sw.init_device_mesh("cpu", (2,), ("tp",))), 2)
