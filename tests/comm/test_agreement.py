"""Ranks that say different things about one tensor are told so at their next collective."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.rules import ranks

import shardwise as sw
from shardwise import DeviceMesh, DTensor, MismatchError, Partial, Replicate, Shard, sharded
from shardwise.comm import agreement


def is_last(mesh: DeviceMesh) -> bool:
    return mesh.get_rank() == mesh.size() - 1


def made(mesh: DeviceMesh, rows: int, placements: Any = None) -> DTensor:
    """Return a tensor of so many rows per rank: a fact that this rank alone knows."""
    placements = placements or [Shard(0)] * mesh.ndim
    local = torch.ones(rows, 3)
    return DTensor.from_local(local, mesh, placements, shape=(rows * mesh.size(), 3))


USES: dict[str, Callable[[DTensor], Any]] = {
    "full_tensor": lambda x: x.full_tensor(),
    "mean": lambda x: x.mean().item(),
    "redistribute": lambda x: x.redistribute(placements=[Shard(1)]),
    "matmul": lambda x: (x.t() @ x).full_tensor(),
}


@pytest.mark.parametrize("use", USES)
def test_shapes_that_differ_between_ranks_are_noticed(use: str) -> None:
    def run(mesh: DeviceMesh) -> None:
        x = made(mesh, 3 if is_last(mesh) else 2)
        USES[use](x)

    with pytest.raises(MismatchError) as caught:
        ranks(run)
    for part in ("rank 0: DTensor.from_local([4@0, 3])", "rank 1: DTensor.from_local([6@0, 3])"):
        assert part in str(caught.value)
    assert "test_agreement.py" in str(caught.value)


def test_placements_that_differ_between_ranks_are_noticed() -> None:
    def run(mesh: DeviceMesh) -> None:
        wanted = Partial() if is_last(mesh) else Replicate()
        x = DTensor.from_local(torch.ones(4), mesh, [wanted], shape=(4,))
        sw.communicator(mesh).barrier()
        x.full_tensor()

    with pytest.raises(MismatchError, match=r"rank 0: .*\[4\]\) at(.|\n)*rank 1: .*\[4\] \+sum@0"):
        ranks(run)


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_ranks_along_any_axis_are_compared(axis: str) -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        made(mesh, 2 + mesh.get_local_rank(axis))
        sw.communicator(mesh, "dp").barrier()
        sw.communicator(mesh, "tp").barrier()

    with pytest.raises(MismatchError, match="say different things"):
        sw.simulate(run, 4)


def test_a_collective_of_more_ranks_does_not_compare_tensors_of_different_ranks() -> None:
    def run() -> list[float]:
        mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        x = made(mesh["tp"], 2 + mesh.get_local_rank("dp"))
        sw.communicator(mesh).barrier()
        return [x.sum().item()]

    assert sw.simulate(run, 4) == [[12.0], [12.0], [18.0], [18.0]]


def test_ranks_of_a_part_of_a_mesh_are_compared_in_a_collective_of_more() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        made(mesh["tp"], 2 + mesh.get_rank())
        sw.communicator(mesh).barrier()

    with pytest.raises(MismatchError, match=r"rank 0: .*\[4@tp, 3\](.|\n)*rank 1: .*\[6@tp, 3\]"):
        sw.simulate(run, 4)


def test_tensors_that_one_rank_makes_alone_do_not_count_against_it() -> None:
    def run(mesh: DeviceMesh) -> None:
        for _ in range(6 if is_last(mesh) else 0):
            made(mesh, 2)
            sw.communicator(mesh).barrier()
        for _ in range(0 if is_last(mesh) else 6):
            sw.communicator(mesh).barrier()
        made(mesh, 2)  # the last rank does not state it any more
        made(mesh, 3)
        sw.communicator(mesh).barrier()

    ranks(run)


@pytest.mark.parametrize("limit", ["_MOST_PENDING", "_MOST_KNOWN"])
def test_tensors_on_other_meshes_do_not_change_what_ranks_compare(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, limit, 4)

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        for rows in range(1, 4):
            made(mesh, rows)
        sw.communicator(mesh).barrier()
        if mesh.get_local_rank("tp") == 0:  # a pipeline's stage, whose ranks do not communicate
            for rows in range(1, 4):
                made(mesh["dp"], rows)
        for rows in range(1, 4):
            made(mesh, rows)
            if limit == "_MOST_KNOWN":
                made(mesh, rows + 10)
        sw.communicator(mesh, "tp").barrier()
        sw.communicator(mesh, "dp").barrier()

    sw.simulate(run, 4)


def test_ranks_that_say_the_same_go_on() -> None:
    def run(mesh: DeviceMesh) -> None:
        for rows in (1, 2, 2, 1, 3):
            assert made(mesh, rows).sum().item() == 6 * rows
        # The order between two collectives does not matter, as each tensor means the same.
        for rows in (4, 5) if is_last(mesh) else (5, 4):
            made(mesh, rows)
        sw.communicator(mesh).barrier()
        # Nor does a tensor that only one rank makes, as long as others make none.
        if is_last(mesh):
            made(mesh, 9)
        sw.communicator(mesh).barrier()
        assert not agreement.stated.facts

    ranks(run)


def test_a_fact_is_compared_only_the_first_times() -> None:
    def run(mesh: DeviceMesh) -> list[int]:
        pending = []
        for _ in range(6):
            made(mesh, 7)
            pending.append(len(agreement.stated.facts))
            sw.communicator(mesh).barrier()
        return pending

    assert ranks(run) == [[1, 1, 1, 1, 0, 0]] * 2


def test_no_collective_is_added() -> None:
    def run(mesh: DeviceMesh) -> None:
        events: list[sw.Event] = []
        with sw.listen(events.append):
            x = made(mesh, 2)
            assert not [event for event in events if event.rank == mesh.get_rank()]
            x.full_tensor()
        assert len([event for event in events if event.rank == mesh.get_rank()]) == 1

    ranks(run)


def test_facts_of_a_mesh_without_peers_are_not_kept() -> None:
    DTensor.from_local(torch.ones(2), DeviceMesh.abstract((2,)), [Shard(0)], shape=(4,))
    DTensor.from_local(torch.ones(2), sw.init_device_mesh("cpu", (1,)), [Shard(0)], shape=(2,))
    assert not agreement.stated.facts


def table() -> sharded.ShardedTensor:
    spec = sharded.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    return sharded.zeros(spec, 4, 4)


def test_a_spec_that_differs_between_ranks_is_noticed_by_reshard() -> None:
    def run(mesh: DeviceMesh) -> None:
        dim = 0 if is_last(mesh) else 1  # the last rank has nothing to do, and goes on
        table().reshard(sharded.ChunkShardingSpec(dim, ["rank:0/cpu", "rank:1/cpu"]))
        sw.communicator(mesh).barrier()

    with pytest.raises(MismatchError, match=r"ShardedTensor.reshard to shards rank 0: \[\(0, 4\)"):
        ranks(run)


def test_a_destination_that_differs_between_ranks_is_noticed_by_gather() -> None:
    def run(mesh: DeviceMesh) -> None:
        table().gather(mesh.get_rank(), torch.zeros(4, 4))

    with pytest.raises(MismatchError) as caught:
        ranks(run)
    assert "gather(dst=0" in str(caught.value) and "gather(dst=1" in str(caught.value)


def test_reshard_and_gather_that_agree_go_on() -> None:
    def run(mesh: DeviceMesh) -> None:
        for dim in (1, 0, 1, 1, 0, 1, 0, 1, 0, 1):
            x = table().reshard(sharded.ChunkShardingSpec(dim, ["rank:1/cpu", "rank:0/cpu"]))
            out = torch.ones(4, 4) if mesh.get_rank() == dim else None
            x.gather(dim, out)
            assert out is None or not out.any()

    ranks(run)
