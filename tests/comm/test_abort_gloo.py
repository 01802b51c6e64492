"""`DeviceMesh.abort` between real ranks: torch forgets the groups, and peers do not wait."""

import gc
import time

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import CollectiveError, DeviceMesh, MeshError, Shard

ABORTED = "was aborted, and its process groups are gone"


def registered():
    return list(dist.distributed_c10d._world.pg_map)


def axes_aborted_and_made_again():
    mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    x = sw.distribute_tensor(torch.arange(6.0), mesh, [Shard(0), Shard(0)])
    held = sw.communicator(mesh), sw.communicator(mesh, "dp")
    held[1].barrier()
    names = {group.group_name for group in mesh.get_all_groups()}
    dist.barrier()  # a peer may still be connecting the groups
    mesh.abort()
    assert not names & {group.group_name for group in registered()}
    for use in (x.full_tensor, mesh.get_all_groups, mesh["tp"].get_group):
        with pytest.raises(MeshError, match=ABORTED):
            use()
    for each in held:
        assert not each.is_usable
        with pytest.raises(CollectiveError, match="was aborted"):
            each.barrier()
    dist.barrier()  # no axis spans all ranks: the default group is left alone
    assert sw.init_device_mesh("cpu", (2, 2), ("dp", "tp")) is mesh
    assert not names & {group.group_name for group in mesh.get_all_groups()}
    assert x.full_tensor().tolist() == list(range(6))


def a_peer_that_waits():
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    group = sw.communicator(mesh, "tp")
    group.barrier()
    start = time.monotonic()
    if mesh.get_rank() in (0, 2):
        with pytest.raises(CollectiveError, match="all_reduce over tp of ranks"):
            group.all_reduce(torch.ones(4))
        assert time.monotonic() - start < 60  # and not the timeout of the group
    mesh.abort()
    gc.collect()
    dist.barrier()  # all are back, those whose process group was closed by a peer too
    group = sw.communicator(DeviceMesh("cpu", mesh.mesh, mesh_dim_names=("dp", "tp")), "tp")
    assert group.all_reduce(torch.ones(4)).tolist() == [2.0] * 4


def the_default_group():
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    sw.communicator(mesh).barrier()
    rank = mesh.get_rank()
    store = dist.distributed_c10d._get_default_store()
    mesh.abort()
    assert not dist.is_initialized() and mesh.get_rank() == rank
    for unusable in (mesh, sw.init_device_mesh("cpu", (2,))):
        with pytest.raises(MeshError, match="init_process_group again, then make the mesh again"):
            sw.communicator(unusable)
    with pytest.raises(MeshError, match="there is no torch process group here: this rank has ab"):
        mesh.get_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2)
    mesh = sw.init_device_mesh("cpu", (2,), ("dp",))
    return sw.communicator(mesh).all_reduce(torch.tensor(rank + 1)).item()


def order_of_ranks():
    mesh = DeviceMesh("cpu", [[2, 0], [3, 1]], preserve_rank_order=True)
    assert dist.get_process_group_ranks(mesh.get_group(1)) in ([2, 0], [3, 1])
    assert mesh.get_group(1).rank() == mesh.get_local_rank(1)


def test_the_groups_of_an_aborted_mesh_are_gone_until_it_is_made_again(workers4):
    workers4.run(axes_aborted_and_made_again)


def test_a_peer_of_a_rank_that_aborts_does_not_wait_for_its_timeout(workers4):
    workers4.run(a_peer_that_waits)


@pytest.mark.slow
def test_a_default_group_that_is_aborted_may_be_started_again():
    assert sw.launch(the_default_group, 2, timeout=180) == [3, 3]


def test_a_rank_stands_in_its_group_where_it_stands_in_the_mesh(workers4):
    workers4.run(order_of_ranks)
