"""Unused parameters contribute zeros; modules that only some ranks call are named in an error."""

import pytest
import torch
from support.fsdp_cases import (
    WIDTH,
    Net,
    assert_at_rest,
    assert_same,
    batch,
    by_layer,
    by_layer_apart,
    full,
    hybrid,
    in_one,
    kinds,
    made,
    mine,
    on_ranks,
    replicated,
    shard_all,
    train,
)
from torch import nn

import shardwise as sw
from shardwise.fsdp import GatherError


class Branches(nn.Module):
    """Each layer has two branches, of which a call uses one; and a parameter for show."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Branch() for _ in range(2))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x, left):
        for layer in self.layers:
            x = layer(x, left)
        return x


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, left):
        return torch.tanh((self.left if left else self.right)(x))


SHARDED = pytest.mark.parametrize("shard", [by_layer, by_layer_apart, in_one, replicated, hybrid])


@SHARDED
@pytest.mark.parametrize("count", [2, 4])
def test_parameters_that_some_ranks_use_get_zeros_from_the_others(shard, count):
    """Only the last rank uses the right branch."""
    plain, x = made(Branches), batch()
    parts = x.chunk(count)
    losses = [plain(part, at < count - 1).square().mean() for at, part in enumerate(parts)]
    (sum(losses) / count).backward()

    def run(mesh):
        model = shard(made(Branches), mesh)
        for _ in range(2):  # the second time from what was there before
            model.zero_grad()
            is_last = mesh.get_rank() == mesh.size() - 1
            model(mine(x, mesh), not is_last).square().mean().backward()
            assert_same(model, plain)
            assert_at_rest(model)

    on_ranks(run, count)


@SHARDED
def test_parameters_that_no_rank_uses_have_no_gradient_or_zeros_on_demand(shard):
    def run(mesh):
        model = shard(made(Branches), mesh)
        model(mine(batch(), mesh), True).square().mean().backward()
        assert model.unused.grad is None and model.layers[0].right.weight.grad is None
        assert model.layers[0].left.weight.grad is not None
        model.set_reduce_scatter_unused_params(True)
        model(mine(batch(), mesh), True).square().mean().backward()
        for parameter in (model.unused, model.layers[0].right.weight):
            assert not full(parameter.grad).any()

    on_ranks(run)


def test_a_second_backward_with_parameters_that_some_ranks_do_not_use():
    plain, x = made(Branches), batch()
    for _ in range(2):
        first, second = x.chunk(2)
        loss = plain(first, True).square().mean() + plain(second, False).square().mean()
        (loss / 2).backward()

    def run(mesh):
        model = by_layer(made(Branches), mesh)
        left = mesh.get_rank() == 0
        losses = [model(mine(x, mesh), left).square().mean() for _ in range(2)]
        for loss in losses:
            loss.backward()
        assert_same(model, plain)

    on_ranks(run)


class Both(Branch):
    """A call uses the left branch, and may use the right one."""

    layers = ()

    def forward(self, x, both=True):
        return torch.tanh(self.left(x) + self.right(x) if both else self.left(x))


@pytest.mark.parametrize("shard", [in_one, replicated, hybrid])
def test_two_models_in_one_backward_of_which_some_ranks_do_not_use_all(shard):
    """The gradients of one wait for its end on some ranks, and must not meet those of the other."""

    plain, x = (made(Both), made(Both)), batch()
    parts = [plain[1](plain[0](part), at != 0) for at, part in enumerate(x.chunk(4))]
    (sum(part.square().mean() for part in parts) / 4).backward()

    def run(mesh):
        ours = [shard(made(Both), mesh) for _ in plain]
        for _ in range(2):
            for model in ours:
                model.zero_grad()
            ours[1](ours[0](mine(x, mesh)), mesh.get_rank() != 0).square().mean().backward()
            assert_same(ours[0], plain[0])
            assert_same(ours[1], plain[1])

    on_ranks(run, 4)


def test_what_a_replica_has_kept_is_not_lost_if_the_last_backward_does_not_use_it():
    plain, x = made(Branches), batch()
    for left in (True, False):
        plain(x, left).square().mean().backward()

    def run(mesh):
        model = hybrid(made(Branches), mesh)
        for left in (True, False):
            model.set_requires_all_reduce(not left)
            model(mine(x, mesh), left).square().mean().backward()
        assert_same(model, plain)

    on_ranks(run, 4)


def test_a_sharded_module_that_some_ranks_do_not_call_is_named():
    def run(mesh):
        model = shard_all(made(), mesh)
        for layer in model.layers:
            layer.set_all_reduce_hook(lambda gradients: None)  # each travels alone
        skipped = mesh.get_rank()
        model.layers[skipped].forward = lambda x: x
        x = mine(batch(), mesh)
        for at, layer in enumerate(model.layers):
            if at != skipped:
                x = layer(x)

    with pytest.raises(
        sw.RankError, match=r"(?s)layers\.[01].*multiplies its output by 0"
    ) as error:
        on_ranks(run)
    assert isinstance(error.value.__cause__, GatherError)


class Skips(Net):
    """Leaves out its second layer."""

    skips = False

    def forward(self, x):
        for at, layer in enumerate(self.layers):
            if at != 1 or not self.skips:
                x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("reshard", [True, False])
def test_a_module_that_one_rank_leaves_out_is_named_when_it_does_so(reshard):
    def run(mesh):
        model = by_layer_apart(made(Skips), mesh)
        model.set_reshard_after_forward(reshard)
        x = mine(batch(), mesh)
        train(model, x, 2)
        model.skips = mesh.get_rank() == 1
        train(model, x, 1)

    what = "unshard" if reshard else "reduce_gradients"
    both = (
        rf"(?s)rank 0 waits .* for {what} of layers\.1 .*rank 1 waits .* for {what} of layers\.0 "
    )
    with pytest.raises(sw.MismatchError, match=both):
        on_ranks(run)


def test_steps_may_differ_if_they_do_so_on_all_ranks():
    """Who departs from the last step asks the others once; the step after that asks nobody."""

    def steps(model, x):
        for skips in (False, True, True, False, True):
            model.skips = skips
            train(model, x, 1)
        return model

    plain = steps(made(Skips), batch())

    def run(mesh):
        model = by_layer_apart(made(Skips), mesh)
        assert_same(steps(model, mine(batch(), mesh)), plain)
        assert_at_rest(model)

        @torch.no_grad()
        def gathers():
            return len(kinds(mesh, lambda: model(batch())))

        assert gathers() == gathers() == 4  # one of them for nothing: its module came next before
        model.skips = False
        assert gathers() > 4
        gathers()
        assert gathers() == gathers() == 4

    on_ranks(run)


def test_ranks_that_end_before_the_others_are_named():
    def run(mesh):
        model = shard_all(made(), mesh)
        if mesh.get_rank() == 0:
            model(batch())

    with pytest.raises(sw.ShardwiseError, match="rank 1"):
        on_ranks(run)
