"""A gathered tensor that is used beside shards: its gradient goes back in one reduce-scatter."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Replicate, Shard

ROWS, INNER, COLUMNS = 64, 32, 48


def products(uses=lambda gathered, weight: gathered @ weight):
    """Gradients of a split x and weight, of which x is gathered first; and the collectives."""
    mesh = sw.init_device_mesh("cpu", (2,), ("tp",))
    torch.manual_seed(0)
    plain = [torch.randn(shape).double() for shape in ((ROWS, INNER), (INNER, COLUMNS))]
    x, weight = (
        sw.distribute_tensor(each, mesh, [how], src_data_rank=None).requires_grad_()
        for each, how in zip(plain, (Shard(0), Shard(1)), strict=True)
    )
    loss = uses(x.redistribute(placements=[Replicate()]), weight).square().sum()
    events = []
    if mesh.get_rank() == 0:  # the ranks take turns: the listener hears both
        with sw.listen(lambda event: event.rank == 0 and events.append(event)):
            loss.backward()
    else:
        loss.backward()
    alone = [each.requires_grad_() for each in plain]
    uses(*alone).square().sum().backward()
    for ours, theirs in zip((x, weight), alone, strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    return [(each.kind, each.shape) for each in events]


def test_it_is_reduce_scattered_and_not_all_reduced_and_cut():
    assert sw.simulate(products, 2)[0] == [("reduce_scatter", (ROWS, INNER))]


def test_several_uses_share_it():
    def uses(gathered, weight):
        return gathered @ weight + gathered @ (2 * weight)

    assert sw.simulate(products, 2, uses=uses)[0] == [("reduce_scatter", (ROWS, INNER))]


def test_other_uses_are_added():
    def uses(gathered, weight):
        return gathered @ weight + gathered.sum()

    sw.simulate(products, 2, uses=uses)


@pytest.mark.parametrize(
    "change",
    [
        lambda gathered: gathered.mul_(2),
        lambda gathered: gathered[:, :].mul_(2),
        lambda gathered: gathered.view_as(gathered),
        lambda gathered: gathered.detach().requires_grad_() + 0 * gathered,
    ],
)
def test_what_happened_to_it_in_between_is_not_lost(change):
    def run():
        mesh = sw.init_device_mesh("cpu", (2,), ("tp",))
        torch.manual_seed(0)
        weight = torch.randn(INNER, COLUMNS)
        split = sw.distribute_tensor(weight, mesh, [Shard(1)], src_data_rank=None)
        start = torch.randn(ROWS, INNER)
        x = sw.distribute_tensor(start, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
        (change(x.redistribute(placements=[Replicate()])) @ split).sum().backward()
        alone = start.clone().requires_grad_()
        (change(alone.clone()) @ weight).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), alone.grad)

    sw.simulate(run, 2)


def test_who_looks_at_its_gradient_sees_all_of_it():
    def run(look):
        mesh = sw.init_device_mesh("cpu", (2,), ("tp",))
        x = sw.ones(4, 6, device_mesh=mesh, placements=[Shard(0)]).requires_grad_()
        weight = sw.ones(6, 8, device_mesh=mesh, placements=[Shard(1)])
        gathered = x.redistribute(placements=[Replicate()])
        seen = []
        if look == "hook":
            gathered.register_hook(seen.append)
        else:
            gathered.retain_grad()
        (gathered @ weight).sum().backward()
        gradient = seen[0] if look == "hook" else gathered.grad
        assert torch.equal(gradient.full_tensor(), torch.full((4, 6), 8.0))
        assert torch.equal(x.grad.full_tensor(), torch.full((4, 6), 8.0))

    for look in ("hook", "retain_grad"):
        sw.simulate(run, 2, look)


def test_who_looks_too_late_is_told():
    def run():
        mesh = sw.init_device_mesh("cpu", (2,), ("tp",))
        x = sw.ones(4, 6, device_mesh=mesh, placements=[Shard(0)]).requires_grad_()
        weight = sw.ones(6, 8, device_mesh=mesh, placements=[Shard(1)])
        gathered = x.redistribute(placements=[Replicate()])
        loss = (gathered @ weight).sum()
        for look in (
            lambda: gathered.register_hook(print),
            gathered.retain_grad,
            lambda: torch.autograd.grad(loss, gathered),
            lambda: loss.backward(inputs=[gathered]),
        ):
            with pytest.raises(
                sw.LayoutError, match=r"was gathered, .* and then used beside shards"
            ):
                look()

    sw.simulate(run, 2)


def test_it_can_be_differentiated_twice():
    def run():
        mesh = sw.init_device_mesh("cpu", (2,), ("tp",))
        torch.manual_seed(0)
        plain = torch.randn(5, 6, dtype=torch.float64), torch.randn(6, 7, dtype=torch.float64)
        x, weight = (
            sw.distribute_tensor(each, mesh, [how], src_data_rank=None).requires_grad_()
            for each, how in zip(plain, (Shard(0), Shard(1)), strict=True)
        )

        def penalty(x, weight, gather):
            loss = (gather(x) @ weight).pow(3).sum()
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), (x, weight))

        ours = penalty(x, weight, lambda each: each.redistribute(placements=[Replicate()]))
        alone = [each.requires_grad_() for each in plain]
        theirs = penalty(*alone, lambda each: each)
        for mine, yours in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.full_tensor(), yours)

    sw.simulate(run, 2)


def test_a_checkpointed_region_does_not_keep_what_was_gathered():
    def run():
        mesh = sw.init_device_mesh("cpu", (2,), ("tp",))
        x = sw.ones(4, 6, device_mesh=mesh, placements=[Shard(0)]).requires_grad_()
        weight = sw.ones(6, 8, device_mesh=mesh, placements=[Shard(1)])
        pieces = []

        def region(x):
            doubled = x * 2
            pieces.append(StorageWeakRef(doubled.to_local().untyped_storage()))
            return 3 * doubled.redistribute(placements=[Replicate()]) @ weight

        result = checkpoint(region, x, use_reentrant=False)
        x.full_tensor()  # until all have left the gather, the simulation holds what they brought
        assert pieces[0].expired()
        result.sum().backward()
        assert torch.equal(x.grad.full_tensor(), torch.full((4, 6), 48.0))

    sw.simulate(run, 2)
