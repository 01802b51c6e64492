"""Files of real ranks with sharded tensors: one for each rank, and checkpoints."""

import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.sharded_tensors import chunks, cut
from torch import nn

import shardwise as sw
from shardwise import Shard, sharded

WHOLE = torch.arange(42.0).reshape(7, 6)


def boxes(first, second):
    """Two shards on the first rank, one and an empty one on the second, none on others."""
    return cut(
        ([0, 0], [3, 6], first),
        ([3, 0], [4, 2], second),
        ([3, 2], [4, 4], first),
        ([7, 0], [0, 6], second),
    )


# ---- each rank its own file


def kept_in_files(path, ranks):
    group = dist.new_group(ranks)
    rank = dist.get_rank()
    if rank not in ranks:
        return
    for spec in (chunks(1, *ranks[::-1]), boxes(ranks[1], ranks[0])):
        module = nn.Module()
        module.weight = nn.Parameter(spec.shard(WHOLE, process_group=group))
        module.register_buffer("scale", spec.shard(WHOLE.long() + 2**60, process_group=group))
        file = f"{path}/{rank}"
        torch.save(module.state_dict(), file)
        with sharded.load_with_process_group(group):
            state = torch.load(file)
            copied = pickle.loads(pickle.dumps(module))
        assert state["weight"]._process_group is group
        assert torch.equal(state["weight"].full_tensor(), WHOLE)
        assert torch.equal(state["scale"].full_tensor(), WHOLE.long() + 2**60)
        assert isinstance(copied.weight, nn.Parameter) and copied.weight.requires_grad
        with torch.no_grad():
            copied.weight.copy_(torch.zeros(7, 6))
        copied.load_state_dict(state)
        assert torch.equal(copied.weight.full_tensor(), WHOLE)
        if len(ranks) < 4:
            with pytest.raises(sharded.ShardedStateError, match=r"local.* when the tensor was sav"):
                torch.load(file)


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [1, 3], [0, 2, 3]])
def test_each_rank_saves_and_loads_its_own_file(workers4, tmp_path, ranks):
    workers4.run(kept_in_files, str(tmp_path), ranks)


def loaded_elsewhere(path):
    rank = dist.get_rank()
    torch.save(chunks(0, *range(4)).shard(WHOLE), f"{path}/{rank}")
    dist.barrier()
    other = (rank + 1) % 4
    wanted = f"local_rank: it was {other} when the tensor was saved, and is {rank} here"
    with pytest.raises(sharded.ShardedStateError, match=wanted):
        torch.load(f"{path}/{other}")


def test_the_file_of_another_rank_is_refused_with_both(workers4, tmp_path):
    workers4.run(loaded_elsewhere, str(tmp_path))


# ---- checkpoints


def stored_and_loaded(path, ranks):
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return
    specs = [chunks(0, *ranks), chunks(1, *ranks[::-1]), boxes(ranks[1], ranks[0])]
    for at, spec in enumerate(specs):
        saved = {
            "weight": nn.Parameter(spec.shard(WHOLE, process_group=group)),
            "count": spec.shard(WHOLE.long() + 2**60, process_group=group),
        }
        dcp.save(saved, checkpoint_id=f"{path}/{at}", process_group=group)
        for other in specs:
            weight = nn.Parameter(sharded.zeros(other, 7, 6, process_group=group))
            count = sharded.zeros(other, 7, 6, dtype=torch.int64, process_group=group)
            loaded = {"weight": weight, "count": count}
            dcp.load(loaded, checkpoint_id=f"{path}/{at}", process_group=group)
            assert loaded["weight"] is weight and weight.requires_grad and weight.is_leaf
            assert torch.equal(weight.full_tensor(), WHOLE)
            assert torch.equal(count.full_tensor(), WHOLE.long() + 2**60)


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [1, 3], [0, 2, 3]])
def test_a_checkpoint_is_loaded_into_other_shards(workers4, tmp_path, ranks):
    workers4.run(stored_and_loaded, str(tmp_path), ranks)


def stored_and_loaded_as_others(path):
    mesh = sw.init_device_mesh("cpu", (4,))
    dcp.save({"x": boxes(2, 1).shard(WHOLE)}, checkpoint_id=f"{path}/shards")
    as_dtensor = sw.zeros(7, 6, device_mesh=mesh, placements=[Shard(1)])
    plain = torch.zeros(7, 6)
    for target in (as_dtensor, plain):
        dcp.load({"x": target}, checkpoint_id=f"{path}/shards")
    assert torch.equal(as_dtensor.full_tensor(), WHOLE) and torch.equal(plain, WHOLE)
    dcp.save({"x": as_dtensor}, checkpoint_id=f"{path}/layout")
    back = sharded.zeros(boxes(0, 3), 7, 6)
    dcp.load({"x": back}, checkpoint_id=f"{path}/layout")
    assert torch.equal(back.full_tensor(), WHOLE)


def test_a_checkpoint_is_loaded_into_dtensors_and_plain_tensors_and_back(workers4, tmp_path):
    workers4.run(stored_and_loaded_as_others, str(tmp_path))


def stored_while_it_changes(path):
    mesh = sw.init_device_mesh("cpu", (4,))
    state = {
        "shards": boxes(2, 1).shard(WHOLE),
        "layout": sw.distribute_tensor(WHOLE, mesh, [Shard(1)]),
    }
    stored = dcp.async_save(
        state,
        checkpoint_id=path,
        async_stager=sw.CheckpointStager(),
        process_group=dist.new_group(),  # of its own: this thread goes on to use the default one
    )
    for each in state.values():
        each.zero_()
        assert not each.full_tensor().any()
    stored.result()
    dcp.load(state, checkpoint_id=path)
    for each in state.values():
        assert torch.equal(each.full_tensor(), WHOLE)


def test_a_checkpoint_saved_aside_is_of_the_state_at_the_time(workers4, tmp_path):
    workers4.run(stored_while_it_changes, str(tmp_path))


# ---- a recommender, trained by four ranks and then by two


class Recommender(nn.Module):
    """Tables for embedding bags, and a linear layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.EmbeddingBag(11, 6) for _ in range(3))
        self.top = nn.Linear(18, 1)

    def forward(self, bags):
        return self.top(torch.cat([table(bags) for table in self.tables], 1)).squeeze(1)


def trained(model, optimizer, steps, mesh=None):
    """Return the losses of some steps; on a mesh, each rank has a part of the batch."""
    losses = []
    for step in steps:
        bags = torch.arange(24).view(8, 3) * (step + 1) % 11
        targets = torch.arange(8.0) % 3
        if mesh is not None:
            bags, targets = (sw.distribute_tensor(x, mesh, [Shard(0)]) for x in (bags, targets))
        loss = nn.functional.mse_loss(model(bags), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def recommender_on(ranks, group):
    model = Recommender()
    specs = chunks(0, *ranks), chunks(1, *reversed(ranks)), chunks(0, ranks[-1])
    plan = {f"tables.{at}.weight": spec for at, spec in enumerate(specs)}
    sharded.shard_module(model, sharded.ShardingPlan(plan), process_group=group)
    named = dict(sharded.named_params_with_sharded_tensor(model))
    optimizer = sharded.ShardedOptimizer(named, torch.optim.Adam, lr=0.1)
    return model, optimizer, sw.DeviceMesh("cpu", ranks)


def trained_by_four_and_then_by_two(path):
    model, optimizer, mesh = recommender_on([0, 1, 2, 3], None)
    losses = trained(model, optimizer, range(2), mesh)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=path)
    group = dist.new_group([2, 1])
    if dist.get_rank() not in (1, 2):
        return losses
    model, optimizer, mesh = recommender_on([1, 2], group)
    optimizer.init_state()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path, process_group=group)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return losses + trained(model, optimizer, range(2, 4), mesh)


def test_a_recommender_of_four_ranks_trains_on_with_two(workers4, tmp_path):
    model = Recommender()
    alone = trained(model, torch.optim.Adam(model.parameters(), lr=0.1), range(4))
    for losses in workers4.run(trained_by_four_and_then_by_two, str(tmp_path)):
        assert losses == pytest.approx(alone[: len(losses)], rel=1e-5)
