"""torch.distributed.checkpoint stores and loads DTensors, also into another layout."""

import torch
import torch.distributed.checkpoint as dcp

import shardwise as sw
from shardwise import Replicate, Shard

WHOLE = torch.arange(35.0).reshape(7, 5)


def stored_and_loaded(path):
    mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    saved = sw.distribute_tensor(WHOLE, mesh, [Shard(0), Shard(0)], shard_order={0: ["tp", "dp"]})
    dcp.save({"weight": saved, "small": sw.ones(1, device_mesh=mesh, placements=[Shard(0)] * 2)},
             checkpoint_id=path)  # fmt: skip
    for placements in ([Shard(1), Replicate()], [Shard(0), Shard(1)], [Replicate(), Replicate()]):
        target = sw.zeros(7, 5, device_mesh=mesh, placements=placements)
        small = sw.zeros(1, device_mesh=mesh, placements=[Replicate(), Replicate()])
        dcp.load({"weight": target, "small": small}, checkpoint_id=path)
        assert torch.equal(target.full_tensor(), WHOLE) and small.item() == 1.0


PIECES = Shard(0, pieces=(4, 2, 1), unit=(2, 1, 1))


def pieces_stored_and_loaded(path):
    mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    saved = sw.distribute_tensor(WHOLE, mesh, [Replicate(), PIECES])
    dcp.save({"weight": saved}, checkpoint_id=path)
    for placements in ([Shard(1), PIECES], [Replicate(), PIECES], [Shard(0), Replicate()]):
        target = sw.zeros(7, 5, device_mesh=mesh, placements=placements)
        dcp.load({"weight": target}, checkpoint_id=path)
        assert torch.equal(target.full_tensor(), WHOLE)


def without_memory(path):
    mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    saved = sw.distribute_tensor(WHOLE, mesh, [Shard(0), Shard(1)])
    dcp.save({"weight": saved}, checkpoint_id=path)
    with torch.device("meta"):
        target = sw.empty(7, 5, device_mesh=mesh, placements=[Shard(1), Replicate()])
    state = {"weight": target}
    dcp.load(state, checkpoint_id=path)
    assert target.is_meta and torch.equal(state["weight"].full_tensor(), WHOLE)
    assert state["weight"].placements == target.placements


def on_some_of_the_ranks(path):
    part = sw.DeviceMesh("cpu", [2, 1])
    saved = sw.distribute_tensor(WHOLE, part, [Shard(0)])
    dcp.save({"weight": saved}, checkpoint_id=path)
    target = sw.distribute_tensor(torch.zeros(7, 5), part, [Shard(1)])
    dcp.load({"weight": target}, checkpoint_id=path)
    if part.get_coordinate() is not None:
        assert torch.equal(target.full_tensor(), WHOLE)


def test_a_tensor_without_memory_gets_some_and_is_loaded(workers4, tmp_path):
    workers4.run(without_memory, str(tmp_path))


def test_a_tensor_on_some_of_the_ranks_is_stored_and_loaded_by_them(workers4, tmp_path):
    workers4.run(on_some_of_the_ranks, str(tmp_path))


def test_pieces_of_a_dim_are_stored_where_they_are_in_the_whole(workers4, tmp_path):
    workers4.run(pieces_stored_and_loaded, str(tmp_path))


def test_a_checkpoint_is_loaded_into_any_layout(workers4, tmp_path):
    workers4.run(stored_and_loaded, str(tmp_path))
