"""set_keep_unsharded_storage: gathered parameters keep their memory addresses."""

import pytest
import torch
from support.fsdp_cases import (
    apart,
    assert_at_rest,
    batch,
    made,
    mean_square,
    mine,
    on_ranks,
    shard_all,
)
from torch import nn

from shardwise.fsdp import fully_shard, replicate


def addresses(model):
    return [
        param.gathered.untyped_storage().data_ptr()
        for unit in model._fsdp_group.schedule.unit_set.units
        for param in unit.params
    ]


def same_gradients(model, mesh):
    plain = made()
    for _ in range(3):
        model.zero_grad()
        mean_square(model, mine(batch(), mesh)).backward()
    mean_square(plain, batch()).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_kept_memory_has_one_address(reshard):
    def run(mesh):
        model = shard_all(made(), mesh, reshard_after_forward=reshard)
        model.set_keep_unsharded_storage(True)
        model(mine(batch(), mesh))
        before = addresses(model)
        assert all(before)
        same_gradients(model, mesh)
        assert type(model.head.weight).__name__ == "DTensor"  # what modules hold is as ever
        assert addresses(model) == before
        assert all(unit.gathered_bytes for unit in model._fsdp_group.schedule.unit_set.units)
        model.set_keep_unsharded_storage(False)
        assert_at_rest(model)
        same_gradients(model, mesh)
        assert_at_rest(model)

    on_ranks(run, 4)


def test_kept_memory_is_the_same_when_users_gather():
    def run(mesh):
        model = apart(shard_all(made(), mesh))
        model.set_keep_unsharded_storage(True)
        found = []
        for _ in range(3):
            model.unshard()
            found.append(model.head.weight.data_ptr())
            model.reshard()
        assert len(set(found)) == 1
        model.unshard(async_op=True)
        model.set_keep_unsharded_storage(False)  # while it is under way
        model.reshard()
        assert_at_rest(model)

    on_ranks(run)


def test_kept_memory_is_gathered_anew():
    def run(mesh):
        model = shard_all(made(), mesh)
        model.set_keep_unsharded_storage(True)
        x = mine(batch(), mesh)
        before = model(x)
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(2)
        assert not torch.equal(model(x), before)

    on_ranks(run)


def test_it_may_be_one_module_that_keeps_its_memory():
    def run(mesh):
        model = shard_all(made(), mesh)
        layer = model.layers[1]
        mean_square(model, mine(batch(), mesh)).backward()
        model.set_keep_unsharded_storage(True, recurse=False)
        layer.set_keep_unsharded_storage(True)
        mean_square(model, mine(batch(), mesh)).backward()
        kept = {
            module: sum(unit.gathered_bytes for unit in module._fsdp_group.units) > 0
            for module in (model, *model.layers)
        }
        assert [kept[each] for each in (model, *model.layers)] == [True, False, True, False]
        layer.unshard()
        model.set_keep_unsharded_storage(False)
        assert layer.linear.weight.square().sum() > 0  # what is gathered stays so
        layer.reshard()
        mean_square(model, mine(batch(), mesh)).backward()
        assert_at_rest(model)

    on_ranks(run)


def test_parameters_with_extensions_keep_their_memory_too():
    def before(shard, mesh, outer_size, outer_stride, module, mp_policy):
        return (shard,), None

    def after(shard, gathered, metadata, param_dtype, *, out=None):
        if out is None:
            whole = gathered[0].clone()
            return whole, (whole,)
        out.copy_(gathered[0])

    def run(mesh):
        model = nn.Linear(4, 6)
        model.weight.fsdp_pre_all_gather, model.weight.fsdp_post_all_gather = before, after
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        model.set_keep_unsharded_storage(True)
        found = []
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            found.append(addresses(model))
        assert all(found[0]) and found[0] == found[1] == found[2]
        model.set_keep_unsharded_storage(False)
        assert_at_rest(model)

    on_ranks(run)


def test_replicated_parameters_stay_anyway():
    def run(mesh):
        model = replicate(made(), mesh=mesh)
        model.set_keep_unsharded_storage(True)
        same_gradients(model, mesh)
        model.set_keep_unsharded_storage(False)
        same_gradients(model, mesh)

    on_ranks(run)
