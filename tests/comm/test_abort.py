"""`DeviceMesh.abort` ends the communication over a mesh: nobody waits, and who goes on is told."""

import pytest
import torch

import shardwise as sw
from shardwise import CollectiveError, DeviceMesh, MeshError, Shard

ABORTED = "was aborted, and its process groups are gone"


def mesh_of_four() -> DeviceMesh:
    return sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))


def test_all_that_a_mesh_was_used_for_says_that_it_was_aborted() -> None:
    def run() -> None:
        mesh = mesh_of_four()
        x = sw.distribute_tensor(torch.arange(4.0), mesh, [Shard(0), Shard(0)])
        over_rows, over_all = sw.communicator(mesh, "dp"), sw.communicator(mesh)
        part, flat = mesh["tp"], mesh.flatten()
        sw.communicator(part).barrier()
        mesh.abort()
        for use in (
            x.full_tensor,
            x.sum().item,
            lambda: sw.communicator(mesh, "dp"),
            lambda: sw.communicator(part),
            lambda: sw.communicator(flat),
            lambda: sw.communicator(mesh["dp"], channel="another"),
        ):
            with pytest.raises(MeshError, match=ABORTED):
                use()
        for held in (over_rows, over_all):
            assert not held.is_usable
            with pytest.raises(CollectiveError, match="has aborted the mesh"):
                held.barrier()
        assert x.to_local().tolist() == [mesh.get_rank()]  # what it holds is still there
        mesh.abort()  # there is nothing left to do

    sw.simulate(run, 4)


def test_a_mesh_that_is_made_again_on_all_ranks_talks_again() -> None:
    def run() -> list[float]:
        mesh = mesh_of_four()
        x = sw.distribute_tensor(torch.arange(4.0), mesh, [Shard(0), Shard(0)])
        part = mesh["tp"]
        part_sum = sw.communicator(part).all_reduce(torch.ones(1))
        mesh.abort()
        assert mesh_of_four() is mesh
        part_sum += sw.communicator(part).all_reduce(torch.ones(1))
        return [x.sum().item(), *x.full_tensor().tolist(), part_sum.item()]

    assert sw.simulate(run, 4) == [[6.0, 0.0, 1.0, 2.0, 3.0, 4.0]] * 4


@pytest.mark.parametrize("parallel", [False, True])
def test_a_rank_that_waits_for_one_that_aborts_does_not_wait_on(parallel: bool) -> None:
    def run() -> str:
        mesh = sw.init_device_mesh("cpu", (3,))
        group = sw.communicator(mesh)
        if mesh.get_rank() == 2:
            mesh.abort()
            return "aborted"
        with pytest.raises(CollectiveError, match="rank 2 has aborted the mesh") as raised:
            group.all_reduce(torch.ones(2))
        with pytest.raises(CollectiveError, match="rank 2 has aborted the mesh"):
            group.send(torch.ones(2), 2)  # nor do those that come later
        return str(raised.value)

    first, second, third = sw.simulate(run, 3, parallel=parallel)
    assert third == "aborted"
    assert "all_reduce(shape=(2,)" in first and "all_reduce(shape=(2,)" in second


def test_what_the_aborting_rank_has_under_way_fails_too() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        if mesh.get_rank() == 0:
            pending = sw.communicator(mesh).all_reduce_async(torch.ones(2))
            mesh.abort()
            with pytest.raises(CollectiveError, match="rank 0 has aborted the mesh"):
                pending.wait()
        else:
            with pytest.raises(CollectiveError, match="rank 0 has aborted the mesh"):
                sw.communicator(mesh).all_reduce(torch.ones(2))

    sw.simulate(run, 2)


def test_a_mesh_of_other_ranks_is_not_touched() -> None:
    def run() -> float:
        mesh = mesh_of_four()
        crosswise = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("a", "b"))
        group = sw.communicator(crosswise, "b")
        mesh.abort()
        return group.all_reduce(torch.tensor(float(mesh.get_rank()))).item()

    assert sw.simulate(run, 4) == [3.0] * 4


def test_only_a_root_mesh_is_aborted_and_only_one_with_ranks() -> None:
    def run() -> None:
        mesh = mesh_of_four()
        for part in (mesh["tp"], mesh.flatten(), mesh.unflatten("tp", (1, 2), ("a", "b"))):
            with pytest.raises(MeshError, match=r"abort: expected .* not cut .* mesh.root.abort"):
                part.abort()
        mesh["tp"].root.abort()
        with pytest.raises(MeshError, match=ABORTED):
            sw.communicator(mesh)

    sw.simulate(run, 4)
    with pytest.raises(MeshError, match=r"no process group to abort: .* is abstract"):
        DeviceMesh.abstract((2, 2)).abort()


def test_a_mesh_of_one_process_is_aborted_as_well() -> None:
    mesh = DeviceMesh("cpu", [0])
    mesh.abort()
    with pytest.raises(MeshError, match=ABORTED):
        sw.communicator(mesh)
    assert sw.communicator(DeviceMesh("cpu", [0])).all_reduce(torch.ones(1)).item() == 1


def test_the_order_of_ranks_is_that_of_the_mesh_whatever_is_asked_for() -> None:
    def run() -> list[float]:
        mesh = DeviceMesh("cpu", [2, 0, 1], preserve_rank_order=True)
        assert mesh is DeviceMesh("cpu", [2, 0, 1])
        return sw.communicator(mesh).all_gather(torch.tensor([float(mesh.get_rank())])).tolist()

    assert sw.simulate(run, 3) == [[2.0, 0.0, 1.0]] * 3
