"""Copies of sharded tensors: elements, gradients, leaves and parameters."""

import copy

import pytest
import torch
from support.sharded_tensors import chunks, cut, heard, is_cut_of, numbers, rank_here, refusal, same
from torch import nn

import shardwise as sw
from shardwise.sharded import ChunkShardingSpec, ShardedStateError, ShardedTensorError, zeros

SIZE = [5, 2]
ROWS = chunks(0, 2, 0)  # nothing on rank 1
BOXES = cut(([0, 0], [5, 1], 1), ([0, 1], [2, 1], 0), ([2, 1], [3, 1], 1), ([0, 0], [0, 2], 2))


def made(requires_grad=False, dtype=torch.float64, spec=ROWS):
    return spec.shard(numbers(SIZE, dtype).requires_grad_(requires_grad))


def on_three_ranks(test):
    """Run a test on three simulated ranks."""

    def run():
        sw.simulate(test, 3)

    run.__name__ = test.__name__
    return run


def total(x):
    """Return the sum of this rank's shards, for a backward."""
    return sum((each.tensor.sum() for each in x.local_shards()), torch.zeros(()))


# ---- to


@on_three_ranks
def test_another_dtype_is_another_tensor_of_the_same_shards():
    x = made()
    for y in (
        x.to(torch.float16),
        x.to(dtype=torch.float16),
        x.half(),
        x.to(made(dtype=torch.half)),
    ):
        assert is_cut_of(y, numbers(SIZE, torch.float16), ROWS)
    assert is_cut_of(x, numbers(SIZE), ROWS)


@on_three_ranks
def test_what_is_there_already_is_returned_itself():
    x = made()
    assert x.to("cpu") is x and x.to(torch.float64) is x and x.cpu() is x and x.double() is x
    assert x.to(torch.float64, copy=True) is not x


@on_three_ranks
def test_nothing_of_it_communicates():
    x = made()
    assert heard(lambda: (x.to(torch.int8), x.clone(), x.detach(), copy.deepcopy(x))) == []


@on_three_ranks
def test_the_meta_device_has_shards_without_elements():
    y = made().to("meta")
    assert y.device.type == ("meta") and y.shape == tuple(SIZE)
    assert y.sharding_spec() == ChunkShardingSpec(0, ["rank:2/meta", "rank:0/meta"])
    assert all(each.tensor.is_meta for each in y.local_shards())


@on_three_ranks
def test_another_group_of_the_same_ranks_may_be_given():
    x, mesh = made(), sw.DeviceMesh("cpu", [0, 1, 2])
    assert is_cut_of(x.to("cpu", process_group=mesh), numbers(SIZE))
    assert same(x.cpu(process_group=mesh).full_tensor(), numbers(SIZE))
    alone = sw.DeviceMesh("cpu", [rank_here()])
    assert "process_group: expected one of the same ranks" in refusal(
        lambda: x.to("cpu", process_group=alone)
    )


@on_three_ranks
def test_a_conversion_is_differentiable():
    x = made(requires_grad=True)
    y = x.to(torch.float32)
    assert y.requires_grad and not (y.is_leaf and y.local_shards())
    total(y).backward() if y.local_shards() else None
    for shard in x.local_shards():
        assert shard.tensor.grad.dtype == torch.float64 and (shard.tensor.grad == 1).all()


@on_three_ranks
def test_a_conversion_that_is_not_recorded_requires_no_gradient():
    x = made(requires_grad=True)
    with torch.no_grad():
        y = x.to(torch.float32)
        itself = x.to("cpu", process_group=sw.DeviceMesh("cpu", [0, 1, 2]))
    for each in (y, x.to(torch.int64)):
        assert not each.requires_grad and not each.metadata().tensor_properties.requires_grad
        assert not any(shard.tensor.requires_grad for shard in each.local_shards())
    assert itself.requires_grad


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ShardedStateError, match="cuda: expected a GPU on this rank"):
        zeros(chunks(0, 0), 3).cuda()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_pinned_memory_without_an_accelerator_is_refused():
    x = zeros(chunks(0, 0), 3)
    assert not x.is_pinned()
    with pytest.raises(ShardedStateError, match="pin_memory: expected an accelerator"):
        x.pin_memory()


# ---- clone, detach, requires_grad_


@on_three_ranks
def test_a_clone_has_memory_of_its_own_and_a_history():
    x = made(requires_grad=True)
    y = x.clone()
    assert is_cut_of(y, numbers(SIZE), ROWS) and y.requires_grad
    for mine, theirs in zip(x.local_shards(), y.local_shards(), strict=True):
        assert mine.tensor.data_ptr() != theirs.tensor.data_ptr()
        theirs.tensor.sum().backward()
        assert (mine.tensor.grad == 1).all()
    with torch.no_grad():
        assert not x.clone().requires_grad
    assert is_cut_of(torch.clone(x.detach()), numbers(SIZE), ROWS)


@on_three_ranks
def test_what_is_detached_shares_memory_and_no_history():
    x = made(requires_grad=True)
    for y in (x.detach(), x.data, torch.detach(x)):
        assert is_cut_of(y, numbers(SIZE), ROWS) and not y.requires_grad
        for mine, theirs in zip(x.local_shards(), y.local_shards(), strict=True):
            assert mine.tensor.data_ptr() == theirs.tensor.data_ptr()
    assert x.requires_grad and x.metadata().tensor_properties.requires_grad


@on_three_ranks
def test_to_require_gradients_is_said_of_tensor_shards_and_metadata():
    x = made()
    for value in (True, False):
        assert x.requires_grad_(value) is x
        assert x.requires_grad is value and x.metadata().tensor_properties.requires_grad is value
        assert all(each.tensor.requires_grad is value for each in x.local_shards())
    x.requires_grad = True
    assert x.requires_grad and all(each.tensor.requires_grad for each in x.local_shards())


@on_three_ranks
def test_integers_require_no_gradients_on_any_rank():
    x = made(dtype=torch.int64)
    assert "only Tensors of floating point" in refusal(x.requires_grad_, RuntimeError).replace(
        "Only", "only"
    )
    assert not x.requires_grad and not x.metadata().tensor_properties.requires_grad


@on_three_ranks
def test_a_result_is_no_leaf():
    x = made(requires_grad=True)
    y = x * 2
    assert x.is_leaf and y.requires_grad
    assert not y.is_leaf or not y.local_shards()


# ---- gradients


@on_three_ranks
def test_the_gradient_is_a_sharded_tensor():
    x = made(requires_grad=True)
    assert x.grad is None
    for shard in x.local_shards():
        (shard.tensor**2).sum().backward()
    if x.local_shards():
        assert is_cut_of(x.grad, 2 * numbers(SIZE), ROWS) and not x.grad.requires_grad
    else:
        assert x.grad is None


@on_three_ranks
def test_a_gradient_can_be_given_and_taken_away():
    x = made(requires_grad=True)
    x.grad = zeros(ROWS, SIZE, dtype=torch.float64)
    assert all((each.tensor.grad == 0).all() for each in x.local_shards())
    x.grad = None
    assert all(each.tensor.grad is None for each in x.local_shards())
    for bad in (torch.zeros(SIZE), made(spec=BOXES)):
        with pytest.raises(ShardedTensorError, match="grad: expected a ShardedTensor with"):
            x.grad = bad


# ---- copy_


@pytest.mark.parametrize("spec", [ROWS, BOXES, chunks(1, 1, 2, 0)], ids=["same", "boxes", "other"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64], ids=str)
def test_elements_are_copied_from_tensors_cut_otherwise_and_converted(spec, dtype):
    def run():
        x = zeros(ROWS, SIZE, dtype=torch.float64)
        other = spec.shard(numbers(SIZE, dtype))
        memory = [each.tensor.data_ptr() for each in x.local_shards()]
        assert x.copy_(other) is x
        assert is_cut_of(x, numbers(SIZE), ROWS) and is_cut_of(other, numbers(SIZE, dtype), spec)
        assert [each.tensor.data_ptr() for each in x.local_shards()] == memory

    sw.simulate(run, 3)


@on_three_ranks
def test_elements_are_copied_from_a_plain_tensor():
    x = zeros(BOXES, SIZE, dtype=torch.float64)
    assert is_cut_of(x.copy_(numbers(SIZE, torch.int32)), numbers(SIZE), BOXES)


@on_three_ranks
def test_elements_are_copied_from_a_dtensor():
    mesh = sw.init_device_mesh("cpu", (3,))
    for placement in (sw.Shard(1), sw.Replicate()):
        other = sw.distribute_tensor(numbers(SIZE), mesh, [placement])
        x = zeros(BOXES, SIZE, dtype=torch.float64)
        assert is_cut_of(x.copy_(other), numbers(SIZE), BOXES)


@on_three_ranks
def test_a_copy_of_another_size_or_from_other_ranks_is_refused():
    x = made()
    assert (
        "copy_: expected a tensor of size (5, 2), or one that broadcasts to it; got (2, 5)"
        in refusal(lambda: x.copy_(torch.zeros(2, 5)))
    )
    alone = sw.DeviceMesh("cpu", [rank_here()])
    other = zeros(chunks(0, rank_here()), SIZE, process_group=alone)
    assert "other: expected one of the same ranks (0, 1, 2), got one of" in refusal(
        lambda: x.copy_(other)
    )


@pytest.mark.parametrize("spec", [chunks(0, 2, 0, 1), chunks(1, 1, 2, 0)], ids=["same", "other"])
def test_gradients_flow_through_a_copy(spec):
    def run():
        other = spec.shard(numbers(SIZE).requires_grad_())
        x = chunks(0, 2, 0, 1).shard(numbers(SIZE))
        x.copy_(other * other)
        assert x.requires_grad and x.metadata().tensor_properties.requires_grad
        total(x).backward()
        assert torch.equal(other.local_tensor().grad, 2 * other.local_tensor())

    sw.simulate(run, 3)


@on_three_ranks
def test_a_copy_that_is_not_recorded_leaves_a_parameter_as_it_was():
    x = made(requires_grad=True)
    with torch.no_grad():
        x.copy_(made(requires_grad=True, spec=BOXES) * 2)
    assert x.requires_grad and x.is_leaf and is_cut_of(x, 2 * numbers(SIZE), ROWS)


@on_three_ranks
def test_a_copy_over_a_parameter_is_refused_as_in_torch():
    x = made(requires_grad=True)  # on a rank without shards too
    assert "leaf Variable" in refusal(lambda: x.copy_(made()), RuntimeError)


# ---- deepcopy


@on_three_ranks
def test_a_deep_copy_has_its_own_memory_and_gradients():
    x = made(requires_grad=True)
    for shard in x.local_shards():
        shard.tensor.grad = torch.ones_like(shard.tensor)
    y = copy.deepcopy(x)
    assert is_cut_of(y, numbers(SIZE), ROWS) and y.requires_grad and y.is_leaf
    for mine, theirs in zip(x.local_shards(), y.local_shards(), strict=True):
        assert mine.tensor.data_ptr() != theirs.tensor.data_ptr()
        assert mine.tensor.grad.data_ptr() != theirs.tensor.grad.data_ptr()
        assert (theirs.tensor.grad == 1).all()
    y.requires_grad_(False)
    assert x.metadata().tensor_properties.requires_grad


@on_three_ranks
def test_what_is_there_twice_is_copied_once():
    x = made()
    one, two = copy.deepcopy([x, x])
    assert one is two and one is not x


@on_three_ranks
def test_a_deep_copy_of_a_parameter_is_a_parameter():
    x = nn.Parameter(made())
    assert isinstance(x, nn.Parameter) and isinstance(copy.deepcopy(x), nn.Parameter)
    assert x.requires_grad and all(each.tensor.requires_grad for each in x.local_shards())


@on_three_ranks
def test_a_deep_copy_of_a_result_is_refused_where_there_is_a_history():
    y = made(requires_grad=True) * 2
    if y.local_shards():
        assert "copy.deepcopy: only leaves" in refusal(lambda: copy.deepcopy(y))


# ---- as an object


@on_three_ranks
def test_the_text_says_dtype_size_spec_and_shards():
    x = made(requires_grad=True)
    text = repr(x)
    assert text.startswith("ShardedTensor(f64[5, 2], ChunkShardingSpec(0, ['rank:2/cpu', 'rank:0")
    assert "requires_grad=True" in text
    assert f"{x}" == str(x) == text
    assert ("Box[0:3, 0:2]: tensor(" in text) == (rank_here() == 2)


@on_three_ranks
def test_it_is_a_key_by_identity():
    x, y = made(), made()
    assert {x: 1, y: 2}[x] == 1 and hash(x) != hash(y)


@on_three_ranks
def test_size_and_kind_are_those_of_the_whole():
    x = made(dtype=torch.bfloat16)
    assert x.size() == torch.Size(SIZE) and x.size(0) == 5 and x.dim() == 2 and len(x) == 5
    assert x.numel() == 10 and x.element_size() == 2 and x.nbytes == 20
    assert x.is_floating_point() and x.layout == torch.strided and not x.is_meta
    assert x.device == torch.device("cpu") and x.grad_fn is None
