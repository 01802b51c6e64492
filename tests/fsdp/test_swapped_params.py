"""torch.__future__.set_swap_module_params_on_conversion(True): parameters stay the same objects."""

import pytest
import torch
from support.fsdp_cases import (
    Net,
    assert_same,
    batch,
    hybrid,
    in_one,
    made,
    mean_square,
    mine,
    on_ranks,
    replicated,
    shard_all,
)

from shardwise import DTensor


@pytest.fixture(autouse=True)
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def convert(model, mesh, shard):
    model.float().double()


def load_shards(model, mesh, shard):
    source = made()
    shard(source, mesh)
    model.load_state_dict(source.state_dict())


def load_whole(model, mesh, shard):
    model.load_state_dict(made().state_dict())


def steps(model, x, optimizer, count=2):
    for _ in range(count):
        optimizer.zero_grad()
        mean_square(model, x).backward()
        optimizer.step()


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("shard", [shard_all, in_one, replicated, hybrid])
@pytest.mark.parametrize("change", [convert, load_shards, load_whole])
@pytest.mark.parametrize("has_run", [False, True])
def test_an_optimizer_made_before_goes_on(shard, change, has_run):
    def run(mesh):
        model = made()
        shard(model, mesh)
        before = list(model.parameters())
        optimizer = torch.optim.SGD(before, lr=0.1)
        if has_run:
            steps(model, mine(batch(), mesh), optimizer)
        optimizer.zero_grad()
        change(model, mesh, shard)
        after = list(model.parameters())
        assert all(one is other for one, other in zip(before, after, strict=True))
        assert all(type(each) is DTensor for each in after)
        steps(model, mine(batch(), mesh), optimizer)
        plain = made()
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
        if has_run and change is convert:
            steps(plain, batch(), theirs)
            plain.float().double()
        theirs.zero_grad()
        steps(plain, batch(), theirs)
        for ours, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor(), wanted, rtol=1e-6, atol=1e-7)

    on_ranks(run, 4)


def test_a_conversion_tells_of_what_shared_memory_before():
    def run(mesh):
        model = shard_all(made(), mesh)
        alias = model.head.weight.detach()
        with pytest.warns(UserWarning, match="still share the old memory"):
            model.float()
        del alias

    on_ranks(run)


@pytest.mark.parametrize("change", [load_shards, load_whole])
def test_a_load_does_not_move_shards(change):
    def run(mesh):
        model = shard_all(made(), mesh)
        alias = model.head.weight.detach()
        with torch.no_grad():
            model.head.weight.zero_()
        change(model, mesh, shard_all)
        assert_same(model, made())
        assert alias.full_tensor().equal(made().head.weight)

    on_ranks(run)


def test_a_meta_model_gets_memory():
    def run(mesh):
        with torch.device("meta"):
            model = Net().double()
        shard_all(model, mesh)
        model.to_empty(device="cpu")
        model.load_state_dict(made().state_dict())
        mean_square(model, mine(batch(), mesh)).backward()
        plain = made()
        mean_square(plain, batch()).backward()
        assert_same(model, plain)

    on_ranks(run)
