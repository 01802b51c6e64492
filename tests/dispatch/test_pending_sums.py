"""Pending sums are reduced once for all uses, and later calls use the reduced value."""

import pytest
import torch
from support.rules import full, heard, ranks, split
from torch.utils.checkpoint import checkpoint

from shardwise import Partial, Replicate, Shard


def kinds(mesh, call):
    """Return the collectives of this rank during a call."""
    return [event.kind for event in heard(mesh, call)[0]]


def pending(mesh, *shape):
    """Return a pending sum that is no leaf of the graph."""
    return split(full(*shape) / 10, mesh, Partial()).requires_grad_() * 1


def rms_norm(x, weight):
    """A norm as models write it: pow reduces the pending sum, and x * ... could pass it on."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def test_later_calls_use_a_sum_that_was_reduced():
    def run(mesh):
        weight = split(full(4), mesh, Replicate()).requires_grad_()
        x = pending(mesh, 3, 4)
        made = []
        assert kinds(mesh, lambda: made.append(rms_norm(x, weight))) == ["all_reduce"]
        assert made[0].placements == (Replicate(),)
        assert torch.allclose(made[0].full_tensor(), rms_norm(full(3, 4) / 10, full(4)))
        assert kinds(mesh, lambda: made[0].sum().backward()) == []

    ranks(run)


def test_a_block_with_a_norm_by_hand_takes_one_all_reduce_each_way():
    def run(mesh):
        weight = split(full(4), mesh, Replicate()).requires_grad_()
        up = split(full(6, 4) / 10, mesh, Shard(0)).requires_grad_()
        down = split(full(4, 6) / 10, mesh, Shard(1)).requires_grad_()
        x = pending(mesh, 3, 4)
        made = []

        def block():
            h = rms_norm(x, weight)
            made.append(x + torch.relu(h @ up.T) @ down.T)

        assert kinds(mesh, block) == ["all_reduce"]
        assert made[0].placements == (Partial(),)  # what is added is pending, so the sum stays so
        assert kinds(mesh, lambda: made[0].sum().backward()) == ["all_reduce"]

    ranks(run)


@pytest.mark.parametrize("linear_first", [True, False])
def test_uses_beside_shards_and_others_share_one_sum(linear_first):
    def run(mesh):
        w = split(full(4, 6) / 10, mesh, Shard(1)).requires_grad_()
        x = pending(mesh, 3, 4)
        calls = [lambda x: x @ w, torch.relu]

        def both():
            first, second = calls if linear_first else calls[::-1]
            return first(x).sum() + second(x).sum()

        events, loss = heard(mesh, both)
        assert [event.kind for event in events] == ["all_reduce"]
        x.retain_grad()
        loss.backward()
        expected = full(4, 6).div(10).sum(1).expand(3, 4) + (full(3, 4) > 0)
        assert torch.allclose(x.grad.full_tensor(), expected.to(x.dtype))

    ranks(run)


def test_the_sum_of_a_changed_tensor_is_reduced_again():
    def run(mesh):
        x = split(full(3, 4), mesh, Partial())
        x.relu()
        x.mul_(2)
        assert (x * full(4)).placements == (Partial(),)
        assert torch.equal(x.relu().full_tensor(), 2 * full(3, 4).relu())
        assert torch.equal((x * full(4)).full_tensor(), 2 * full(3, 4) * full(4))

    ranks(run)


def test_pending_sums_are_reduced_in_inference_mode():
    def run(mesh):
        with torch.inference_mode():
            product = split(full(6, 4), mesh, Shard(1)) @ split(full(4, 6), mesh, Shard(0))
            first = product.relu()
            product.add_(1)  # has no version that would tell
            made = first + product.relu()
            plain = full(6, 4) @ full(4, 6)
            assert torch.equal(made.full_tensor(), plain.relu() + (plain + 1).relu())

    ranks(run)


def test_views_and_casts_with_nothing_to_do_are_of_the_tensor_itself():
    def run(mesh):
        x = split(full(3, 4), mesh, Partial())
        x.relu()  # its sum is made
        assert x.to(x.dtype) is x and x.contiguous() is x
        x.view(12).mul_(2)
        assert torch.equal(x.full_tensor(), 2 * full(3, 4))

    ranks(run)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("sum_first", [True, False])
@pytest.mark.parametrize("made_before", [True, False])
def test_both_runs_of_a_checkpointed_region_decide_alike(use_reentrant, sum_first, made_before):
    def region(x, w):
        # Whether x is pending in the product decides whether the gradient of w is a contribution.
        if sum_first:
            return x.relu() + (x @ w).relu()
        return (x @ w).relu() + x.relu()

    def run(mesh):
        def gradient(call, made, x, w):
            if made:
                x.relu()
            out = call(x, w)
            out.sum().backward()
            return w.grad

        w = split(full(4, 4) / 10, mesh, Replicate()).requires_grad_()
        ours = gradient(
            lambda *args: checkpoint(region, *args, use_reentrant=use_reentrant),
            made_before,
            pending(mesh, 3, 4),
            w,
        )
        plain = (full(4, 4) / 10).requires_grad_()
        theirs = gradient(region, False, full(3, 4) / 10, plain)
        assert torch.allclose(ours.full_tensor(), theirs)

    ranks(run)
