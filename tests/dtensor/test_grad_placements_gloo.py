"""grad_placements of from_local, to_local and local_map: the same gradients as torch's, and nothing
is sent that was asked to stay a contribution."""

import pytest
import torch
from support.rules import full, heard, ranks

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard

FORWARD = ("Shard", "Replicate", "Partial")
GRADIENT = (None, "Shard", "Replicate", "Partial")


def placement(library, name):
    return (
        None if name is None else [library.Shard(0) if name == "Shard" else vars(library)[name]()]
    )


USES = {
    "its own": lambda x, batch: (x * 2).sum(),
    "beside a split batch": lambda x, batch: torch.nn.functional.linear(batch, x).sum(),
    "both": lambda x, batch: (x * 2).sum() + torch.nn.functional.linear(batch, x).sum(),
}


def from_local(library, mesh, forward, gradient, use):
    """Return this rank's gradient; None if the call is refused."""
    rows = 2 if forward == "Shard" else 8
    local = torch.ones(rows, 4, requires_grad=True)
    try:
        x = library.DTensor.from_local(
            local, mesh, placement(library, forward), grad_placements=placement(library, gradient)
        )
        batch = library.distribute_tensor(full(8, 4), mesh, [library.Shard(0)])
        loss = USES[use](x, batch)
        loss.redistribute(placements=[library.Replicate()]).backward()
    except RuntimeError:
        return None
    return local.grad


def to_local(library, mesh, forward, gradient, use):
    x = library.distribute_tensor(full(8, 4), mesh, placement(library, forward)).requires_grad_()
    local = x.to_local(grad_placements=placement(library, gradient))
    (local * (mesh.get_local_rank() + 1)).sum().backward()
    return x.grad.full_tensor()


def compared() -> list[str]:
    """Compare with torch on real ranks; return what differs."""
    import torch.distributed.tensor as theirs

    ours_mesh = sw.init_device_mesh("cpu", (4,))
    their_mesh = torch.distributed.init_device_mesh("cpu", (4,))
    differ = []
    for forward in FORWARD:
        for gradient in GRADIENT:
            for use in USES:
                case = forward, gradient, use
                wanted = from_local(theirs, their_mesh, *case)
                got = from_local(sw, ours_mesh, *case)
                is_same = (wanted is None) == (got is None)
                if wanted is not None and got is not None:
                    is_same = torch.allclose(wanted, got)
                if not is_same:
                    differ.append(f"from_local {case}: torch {wanted}, ours {got}")
    for forward, gradient in (
        ("Shard", None),
        ("Shard", "Shard"),
        ("Replicate", "Replicate"),
        ("Replicate", "Partial"),
    ):
        wanted = to_local(theirs, their_mesh, forward, gradient, "")
        got = to_local(sw, ours_mesh, forward, gradient, "")
        if not torch.allclose(wanted, got):
            differ.append(f"to_local {forward, gradient}: torch {wanted}, ours {got}")
    return differ


@pytest.mark.slow
def test_gradients_are_torchs(workers4):
    assert workers4.run(compared) == [[]] * 4


TABLE = [
    (forward, gradient)
    for forward in FORWARD
    for gradient in GRADIENT
    if gradient is None or (forward == "Shard") == (gradient == "Shard")
]


@pytest.mark.parametrize(("forward", "gradient"), TABLE)
@pytest.mark.parametrize("use", USES)
def test_the_gradient_has_the_value_of_one_process(forward, gradient, use):
    whole = torch.ones(8, 4, requires_grad=True)
    scale = 4 if forward == "Partial" else 1
    USES[use](whole * scale, full(8, 4)).backward()
    expected = whole.grad / scale

    def run(mesh):
        got = from_local(sw, mesh, forward, gradient, use)
        kind = gradient or ("Replicate" if forward == "Partial" else forward)
        return DTensor.from_local(got, mesh, placement(sw, kind)).full_tensor()

    for got in ranks(run, 4):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("forward", ["Replicate", "Partial"])
@pytest.mark.parametrize("use", ["its own", "beside a split batch"])
def test_contributions_are_not_sent(forward, use):
    def run(mesh):
        local = torch.ones(8, 4, requires_grad=True)
        x = DTensor.from_local(local, mesh, placement(sw, forward), grad_placements=[Partial()])
        batch = sw.distribute_tensor(full(8, 4), mesh, [Shard(0)])
        loss = USES[use](x, batch).redistribute(placements=[Replicate()])
        events, _ = heard(mesh, loss.backward)
        assert not events
        return local.grad

    alone = full(8, 4).reshape(4, 2, 4)
    for rank, got in enumerate(ranks(run, 4)):
        expected = torch.full((8, 4), 0.5)
        if use != "its own":
            expected = alone[rank].sum(0).expand(8, 4)
        assert torch.equal(got, expected)


def test_hooks_see_whole_gradients_and_late_ones_are_refused():
    def run(mesh):
        seen = []
        local = torch.ones(8, 4, requires_grad=True)
        batch = sw.distribute_tensor(full(8, 4), mesh, [Shard(0)])
        x = DTensor.from_local(local, mesh, [Replicate()], grad_placements=[Partial()])
        x.register_hook(lambda gradient: seen.append(gradient.full_tensor()))
        torch.nn.functional.linear(batch, x).sum().backward()
        assert torch.equal(seen[0], full(8, 4).sum(0).expand(8, 4))
        x = DTensor.from_local(local, mesh, [Replicate()], grad_placements=[Partial()])
        torch.nn.functional.linear(batch, x)
        with pytest.raises(sw.LayoutError, match="never complete"):
            x.register_hook(print)

    ranks(run, 4)


def test_on_two_axes_and_twice_differentiable():
    def run(mesh):
        local = torch.ones(4, 4, requires_grad=True)
        grads = [Partial(), Replicate()]
        x = DTensor.from_local(local, mesh, [Replicate(), Replicate()], grad_placements=grads)
        batch = sw.distribute_tensor(full(8, 4), mesh, [Shard(0), Shard(0)])
        loss = torch.nn.functional.linear(batch, x).square().sum()
        loss = loss.redistribute(placements=[Replicate()] * 2)
        (first,) = torch.autograd.grad(loss, local, create_graph=True)
        whole = DTensor.from_local(first, mesh, grads).full_tensor()
        (again,) = torch.autograd.grad(whole.sum(), local)
        return whole, DTensor.from_local(again, mesh, grads).full_tensor()

    weight = torch.ones(4, 4, requires_grad=True)
    loss = torch.nn.functional.linear(full(8, 4), weight).square().sum()
    (first,) = torch.autograd.grad(loss, weight, create_graph=True)
    (again,) = torch.autograd.grad(first.sum(), weight)
    for got in ranks(run, 4, (2, 2)):
        torch.testing.assert_close(got, (first, again))


def test_local_map_takes_the_same_words():
    def run(mesh):
        x = sw.distribute_tensor(full(8, 4), mesh, [Replicate()]).requires_grad_()
        scaled = sw.local_map(
            lambda local: local * (mesh.get_rank() + 1),
            out_placements=[Partial()],
            in_placements=([Replicate()],),
            in_grad_placements=([Partial()],),
        )
        scaled(x).sum().backward()
        assert torch.equal(x.grad.full_tensor(), torch.full((8, 4), 10.0))

    ranks(run, 4)


@pytest.mark.parametrize("gradient", [Replicate(), Partial(), Shard(1)])
def test_another_split_is_refused_at_once(gradient):
    def run(mesh):
        x = sw.distribute_tensor(full(8, 4), mesh, [Shard(0)]).requires_grad_()
        with pytest.raises(RuntimeError, match="grad_placements: expected the same dims"):
            x.to_local(grad_placements=[gradient])
        with pytest.raises(sw.LayoutError, match="grad_placements: expected the same dims"):
            DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], grad_placements=[gradient])

    ranks(run, 4)
