"""Python's own protocols on DTensors: len, iteration, copies, pickles, assigned data."""

import copy
import io

import pytest
import torch
from support.rules import full, ranks, split

from shardwise import DTensor, LayoutError, Partial, Replicate, Shard


def test_a_tensor_without_dims_has_no_length_and_no_elements():
    def run(mesh):
        x = split(torch.tensor(3.0), mesh, Replicate())
        with pytest.raises(TypeError, match="len\\(\\) of a 0-d tensor"):
            len(x)
        with pytest.raises(TypeError, match="iteration over a 0-d tensor"):
            iter(x)
        assert f"{x:.1f}" == "3.0"

    ranks(run)


def test_a_tensor_that_is_copied_twice_in_one_deepcopy_is_copied_once():
    def run(mesh):
        x = split(full(4), mesh, Shard(0)).requires_grad_()
        x.grad = split(full(4), mesh, Shard(0))
        one, other = copy.deepcopy([x, x])
        assert one is other and one is not x and one.requires_grad
        assert torch.equal(one.grad.full_tensor(), full(4)) and one.grad is not x.grad

    ranks(run)


def test_a_tensor_with_a_history_is_not_deepcopied():
    def run(mesh):
        x = split(full(4), mesh, Shard(0)).requires_grad_()
        with pytest.raises(LayoutError, match=r"only leaves .* as in torch; detach\(\) it"):
            copy.deepcopy(x * 2)

    ranks(run)


# ---- copies that stand for views of a split dim


def test_a_part_is_deepcopied_and_pickled_with_its_current_values():
    def run(mesh):
        x = split(full(6), mesh, Shard(0))
        part = x[1:5]
        x.add_(10)
        expected = (full(6) + 10)[1:5]
        copied = copy.deepcopy(part)
        file = io.BytesIO()
        torch.save(part, file)
        file.seek(0)
        for found in (copied, torch.load(file, weights_only=True)):
            assert type(found) is DTensor and torch.equal(found.full_tensor(), expected)
        copied.zero_()
        assert torch.equal(part.full_tensor(), expected)  # a copy is no part of x

    ranks(run)


def test_a_part_with_other_data_is_no_part_any_more():
    def run(mesh):
        x = split(full(6), mesh, Shard(0))
        part = x[1:5]
        part.data = split(full(4) * 10, mesh, Shard(0))
        part.add_(1)
        assert torch.equal(part.full_tensor(), full(4) * 10 + 1)
        assert torch.equal(x.full_tensor(), full(6))

    ranks(run)


# ---- gradients


def test_leaves_that_autograd_gives_one_gradient_have_each_their_own_layout():
    def run(mesh):
        x = split(full(4), mesh, Shard(0)).requires_grad_()
        pending = DTensor.from_local(full(4), mesh, [Partial()]).detach().requires_grad_()
        seed = split(full(4), mesh, Replicate())
        (x.redistribute(placements=[Replicate()]) + pending).backward(seed)
        assert x.grad.placements == (Shard(0),)
        assert pending.grad.placements == (Replicate(),)
        for each in (x, pending):
            assert torch.equal(each.grad.full_tensor(), full(4))

    ranks(run)


def test_placements_and_gradients_of_other_shapes_are_refused():
    def run(mesh):
        with pytest.raises(LayoutError, match="placements: expected a list of 1"):
            DTensor.from_local(full(2), mesh, 3)
        x = split(full(4), mesh, Shard(0)).requires_grad_()
        with pytest.raises((LayoutError, RuntimeError), match=r"expected a tensor of shape \(4,\)"):
            (x * 2).backward(split(full(6), mesh, Shard(0)))

    ranks(run)
