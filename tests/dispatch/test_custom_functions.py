"""Custom autograd functions, and torch's own that are written so, with DTensors as arguments."""

import pytest
import torch
from support.rules import full, ranks, split
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import DTensor, Replicate, Shard


class Halves(torch.autograd.Function):
    """Returns two tensors and a word."""

    @staticmethod
    def forward(ctx, x):
        return x / 2, x / 2, "halves"

    @staticmethod
    def backward(ctx, left, right, word):
        return (left + right) / 2


def test_every_tensor_that_a_custom_function_returns_is_replicated():
    def run(mesh):
        x = split(full(4), mesh, Replicate()).requires_grad_()
        left, right, word = Halves.apply(x)
        assert word == "halves"
        for each in (left, right):
            assert isinstance(each, DTensor) and torch.equal(each.full_tensor(), full(4) / 2)
        (left + 3 * right).sum().backward()
        assert torch.equal(x.grad.full_tensor(), torch.full((4,), 2.0))

    ranks(run)


def test_a_custom_function_of_a_split_tensor_is_refused_with_a_remedy_that_works():
    def run(mesh):
        x = split(full(4), mesh, Shard(0))
        with pytest.raises(sw.DispatchError, match=r"Halves\.apply: .*sw\.local_map\("):
            Halves.apply(x)
        halves = sw.local_map(Halves.apply, out_placements=([Shard(0)], [Shard(0)], None))
        left, _, word = halves(x)
        assert word == "halves" and torch.equal(left.full_tensor(), full(4) / 2)

    ranks(run)


def test_a_recomputed_function_may_return_other_things_beside_dtensors():
    def run(mesh):
        x = split(full(4), mesh, Shard(0)).requires_grad_()

        def block(x):
            return x * x, "note", torch.ones(2)

        square, note, plain = checkpoint(block, x, use_reentrant=True)
        assert note == "note" and type(plain) is torch.Tensor
        assert torch.equal(square.full_tensor(), full(4) ** 2)
        square.sum().backward()
        assert torch.equal(x.grad.full_tensor(), 2 * full(4))

    ranks(run)


def test_inputs_of_a_gradient_may_be_a_dict():
    """torch takes the values of one, such as `dict(model.named_parameters())`."""

    def run(mesh):
        x, y = (split(full(4), mesh, Shard(0)).requires_grad_() for _ in range(2))
        found = torch.autograd.grad((x * y).sum(), {"x": x, "y": y}.values())
        assert [each.placements for each in found] == [(Shard(0),)] * 2
        assert all(torch.equal(each.full_tensor(), full(4)) for each in found)

    ranks(run)
