"""The collectives between real ranks over gloo, and the process groups behind them."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import (
    CASES,
    WHERES,
    check,
    check_reduced,
    reduced,
    run_case,
    untouched,
    value,
    values,
)
from support.collectives_in_place import IN_PLACE_CASES, IN_PLACE_RUNS
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh

import shardwise as sw
from shardwise.comm.c10d import C10dCommunicator

NAMES = ("dp", "tp")
TIMEOUT = timedelta(seconds=60)
ALL_CASES = CASES | IN_PLACE_CASES


def start_again(store: Path) -> None:
    """A new default group, in which no other group was made yet."""
    rank = int(os.environ["RANK"])
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), 4), rank=rank, world_size=4, timeout=TIMEOUT
    )


@pytest.fixture
def fresh4(workers4_apart: sw.Workers, tmp_path: Path) -> sw.Workers:
    """Four ranks that have made no groups yet."""
    workers4_apart.run(start_again, tmp_path / "first")
    return workers4_apart


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(("case", "where"), [*product(CASES, WHERES), *IN_PLACE_RUNS])
def test_collectives_of_real_ranks(workers4: sw.Workers, case: str, where: str) -> None:
    ran_with = workers4.run(run_case, ALL_CASES[case], WHERES[where], exact=False)
    for rank, ranks in enumerate(ran_with):
        groups = WHERES[where].expected
        assert ranks == next((group for group in groups if rank in group), None)


def square() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (2, 2), NAMES)


def who_is_there(comm: sw.Communicator) -> list[int]:
    """A collective by which everybody learns who is there."""
    return comm.all_gather(torch.tensor([dist.get_rank()])).tolist()


# ---- the backend's own reduce-scatter


def native_reduce_scatter() -> None:
    comm = sw.communicator(sw.init_device_mesh("cpu", (4,)))
    assert isinstance(comm, C10dCommunicator)
    cases = {
        "sum": (torch.float32, torch.int64, torch.bool),
        "avg": (torch.float32, torch.float64),
        "max": (torch.float32, torch.bool, torch.uint8),
        "product": (torch.float64, torch.bool),
    }
    for op, dim in product(cases, (0, 1)):
        for dtype in cases[op]:
            x = value(comm.index, (8, 8), dtype)
            everybodys = [each.chunk(4, dim)[comm.index] for each in values(comm, (8, 8), dtype)]
            with untouched(x):
                result = comm._start_native_reduce_scatter(list(x.chunk(4, dim)), op).wait()
                check_reduced(result, everybodys, op, [x], exact=False)


def test_a_native_reduce_scatter_gives_the_same(workers4: sw.Workers) -> None:
    workers4.run(native_reduce_scatter)


# ---- messages that nobody waits for


def messages_whose_pending_is_dropped() -> list[list[float]]:
    comm = sw.communicator(sw.init_device_mesh("cpu", (4,)))
    assert isinstance(comm, C10dCommunicator)
    before = len(comm._messages)
    after, source = (comm.index + 1) % 4, (comm.index - 1) % 4
    received = []
    for turn in range(3):
        comm.send_async(torch.full((1000,), 10.0 * comm.index + turn), after)
        gc.collect()
        comm.barrier()
    for _ in range(3):
        result = comm.recv(torch.empty(1000), source)
        assert result.unique().numel() == 1
        received.append(result[0].item())
    out = torch.zeros(3)
    comm.exchange_async({after: torch.full((3,), float(comm.index))}, {source: out})
    gc.collect()
    comm.barrier()
    comm.recv(torch.empty(1), source) if comm.index else comm.send(torch.ones(1), after)
    comm.send(torch.ones(1), after) if comm.index else comm.recv(torch.empty(1), source)
    deadline = time.monotonic() + 10
    while not (out == source).all() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(comm._messages) - before <= 4  # what was waited for is not kept
    return [received, out.tolist()]


def test_a_message_arrives_also_if_nobody_waits_for_its_sending(workers4: sw.Workers) -> None:
    assert workers4.run(messages_whose_pending_is_dropped) == [
        [[30, 31, 32], [3, 3, 3]],
        [[0, 1, 2], [0, 0, 0]],
        [[10, 11, 12], [1, 1, 1]],
        [[20, 21, 22], [2, 2, 2]],
    ]


# ---- bytes on the wire


def bytes_written() -> int:
    """By this process, to files and sockets alike."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("wchar: "):
            return int(line.removeprefix("wchar: "))
    raise AssertionError("no count of bytes")


def bytes_sent_by(kind: str, count: int) -> int:
    """What this rank sends for a collective of all."""
    comm = sw.communicator(sw.init_device_mesh("cpu", (4,)))
    comm.barrier()
    before = bytes_written()
    getattr(comm, kind)(torch.ones(count))
    comm.barrier()
    return bytes_written() - before


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes as Linux shows them")
def test_a_reduce_scatter_moves_half_of_an_all_reduce(workers4: sw.Workers) -> None:
    count = 1 << 20
    bytes_in = 4 * count
    assert sum(workers4.run(bytes_sent_by, "all_reduce", count)) == pytest.approx(
        6 * bytes_in, rel=0.01
    )
    assert sum(workers4.run(bytes_sent_by, "reduce_scatter", count)) == pytest.approx(
        3 * bytes_in, rel=0.01
    )


# ---- groups


def ranks_in_different_numbers_of_groups() -> list[list[int]]:
    """Rank 0 makes three groups before it meets rank 3, which makes only that one."""
    pairs = {0: [(0, 1), (0, 2), (1, 0), (0, 3)], 1: [(0, 1), (1, 0), (1, 2)]}
    pairs |= {2: [(0, 2), (1, 2)], 3: [(0, 3)]}
    return [
        who_is_there(sw.communicator(sw.DeviceMesh("cpu", pair))) for pair in pairs[dist.get_rank()]
    ]


def test_groups_are_made_by_their_members_only(workers4: sw.Workers) -> None:
    assert workers4.run(ranks_in_different_numbers_of_groups) == [
        [[0, 1], [0, 2], [1, 0], [0, 3]],
        [[0, 1], [1, 0], [1, 2]],
        [[0, 2], [1, 2]],
        [[0, 3]],
    ]


def groups_made_by(make: Callable[[], Any]) -> int:
    before = len(c10d._world.pg_names)
    make()
    return len(c10d._world.pg_names) - before


def groups_are_cached() -> None:
    mesh = sw.DeviceMesh("cpu", [[3, 2], [1, 0]], mesh_dim_names=("a", "b"))
    assert groups_made_by(lambda: sw.communicator(mesh, "a")) == 1

    def ask_again() -> None:
        assert sw.communicator(mesh, "a") is sw.communicator(mesh, 0)
        assert mesh.get_group("a") is mesh.get_group(0)
        assert sw.communicator(mesh["a"]).ranks == sw.communicator(mesh, "a").ranks
        assert mesh["a"].get_group() is mesh.get_group("a")
        renamed = sw.DeviceMesh("cpu", [[3, 2], [1, 0]], mesh_dim_names=("x", "y"))
        assert renamed.get_group("x") is mesh.get_group("a")

    assert groups_made_by(ask_again) == 0


def test_groups_are_cached_and_shared_by_meshes(fresh4: sw.Workers) -> None:
    fresh4.run(groups_are_cached)


def threads_ask_at_once() -> int:
    mesh = sw.DeviceMesh("cpu", [[3, 2], [1, 0]], mesh_dim_names=("a", "b"))
    start = threading.Barrier(8)
    found: list[Any] = []

    def ask(turn: int) -> None:
        start.wait()
        found.append(mesh.get_group("a") if turn % 2 else sw.communicator(mesh, "a"))

    def ask_all() -> None:
        threads = [threading.Thread(target=ask, args=(turn,)) for turn in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    made = groups_made_by(ask_all)
    assert len(found) == 8
    assert len({id(each) for each in found}) == 2  # the group and its communicator
    return made


def test_threads_that_ask_at_once_get_the_same_group(fresh4: sw.Workers) -> None:
    assert fresh4.run(threads_ask_at_once) == [1] * 4


def the_whole_world_needs_no_new_group() -> int:
    world = sw.init_device_mesh("cpu", (4,))
    assert world.get_group() is dist.group.WORLD
    return groups_made_by(lambda: who_is_there(sw.communicator(square(), NAMES)))


def test_the_default_group_serves_all_ranks_in_order(workers4: sw.Workers) -> None:
    assert workers4.run(the_whole_world_needs_no_new_group) == [0] * 4


def groups_are_usable() -> list[list[int]]:
    mesh = square()
    dp, tp = mesh.get_all_groups()
    assert dp is mesh.get_group("dp") and tp is mesh.get_group("tp")
    found = []
    for group in (dp, tp):
        assert isinstance(group, dist.ProcessGroup)
        total = torch.tensor([dist.get_rank()])
        dist.all_reduce(total, group=group)
        everybodys: list[Any] = [None, None]
        dist.all_gather_object(everybodys, dist.get_rank(), group=group)
        assert sum(everybodys) == total.item()
        assert dist.get_process_group_ranks(group) == everybodys
        assert dist.get_group_rank(group, dist.get_rank()) == dist.get_rank(group)
        found.append(everybodys)
    return found


def test_the_groups_of_a_mesh_are_usable_by_torch(workers4: sw.Workers) -> None:
    dp, tp = [[0, 2], [1, 3]], [[0, 1], [2, 3]]
    assert workers4.run(groups_are_usable) == [
        [dp[0], tp[0]],
        [dp[1], tp[0]],
        [dp[0], tp[1]],
        [dp[1], tp[1]],
    ]


# ---- torch's groups and meshes


def mesh_from_groups() -> None:
    rank = dist.get_rank()
    # Pairs that no other test has used, so that nothing is cached.
    rows = [dist.new_group(pair, sort_ranks=False) for pair in ([3, 0], [2, 1])]
    columns = [dist.new_group(pair, sort_ranks=False) for pair in ([3, 2], [0, 1])]
    row, column = rows[0 if rank in (3, 0) else 1], columns[0 if rank in (3, 2) else 1]

    def use() -> None:
        mesh = sw.DeviceMesh.from_group(
            [column, row], "cpu", [[3, 0], [2, 1]], mesh_dim_names=NAMES
        )
        assert mesh.shape == (2, 2) and mesh.mesh_dim_names == NAMES
        assert mesh.get_all_groups() == [column, row]
        assert who_is_there(sw.communicator(mesh, "tp")) == dist.get_process_group_ranks(row)
        assert who_is_there(sw.communicator(mesh, "dp")) == dist.get_process_group_ranks(column)
        one_axis = sw.DeviceMesh.from_group(row, "cpu")
        assert one_axis.mesh.tolist() == dist.get_process_group_ranks(row)
        assert one_axis.get_group() is row

    assert groups_made_by(use) == 0
    with pytest.raises(sw.MeshError, match=r"^mesh: expected the ranks' grid.*2 groups"):
        sw.DeviceMesh.from_group([row, column], "cpu")
    with pytest.raises(sw.MeshError, match=r"^group: expected ranks .* got a group of ranks"):
        sw.DeviceMesh.from_group([row, column], "cpu", [[3, 0], [2, 1]])


def test_a_mesh_from_groups_uses_them(fresh4: sw.Workers) -> None:
    fresh4.run(mesh_from_groups)


def torch_mesh_is_accepted() -> None:
    torch_mesh = init_torch_mesh("cpu", (2, 2), mesh_dim_names=("p", "q"))
    groups = torch_mesh.get_all_groups()

    def use() -> None:
        mesh = sw.DeviceMesh.from_torch(torch_mesh)
        assert mesh is sw.init_device_mesh("cpu", (2, 2), ("p", "q"))
        assert mesh.get_all_groups() == groups
        assert sw.communicator(torch_mesh, "q") is sw.communicator(mesh, "q")
        assert who_is_there(sw.communicator(torch_mesh, "p")) == mesh["p"].mesh.tolist()
        assert sw.Layout(torch_mesh, (4, 4), (("p",), ("q",))).mesh is mesh
        parsed = sw.Layout.parse("[4@p, 4@q]", torch_mesh)
        assert parsed is sw.Layout(mesh, (4, 4), (("p",), ("q",)))

    assert groups_made_by(use) == 0
    assert torch_mesh.get_all_groups() == groups


def test_a_torch_mesh_is_accepted_with_its_groups(fresh4: sw.Workers) -> None:
    fresh4.run(torch_mesh_is_accepted)


def there_and_back() -> None:
    for mesh in (
        square(),
        sw.DeviceMesh("cpu", [[2, 0], [3, 1]], mesh_dim_names=("r", "s")),
        sw.DeviceMesh("cpu", [2, 0, 3, 1], mesh_dim_names=("x",)),
        sw.DeviceMesh("cpu", [[[0], [1]], [[2], [3]]], mesh_dim_names=("i", "j", "k")),
        sw.DeviceMesh("cpu", [1, 3, 0, 2]),
    ):
        mesh.get_all_groups()
        made: list[TorchMesh] = []
        assert groups_made_by(lambda m=mesh, made=made: made.append(m.to_torch())) == 0
        (torch_mesh,) = made
        assert isinstance(torch_mesh, TorchMesh)
        assert torch_mesh.mesh.tolist() == mesh.mesh.tolist()
        assert torch_mesh.mesh_dim_names == mesh.mesh_dim_names
        assert torch_mesh.get_all_groups() == mesh.get_all_groups()
        assert tuple(torch_mesh.get_coordinate() or ()) == mesh.get_coordinate()
        assert groups_made_by(lambda t=torch_mesh: sw.DeviceMesh.from_torch(t)) == 0
        assert sw.DeviceMesh.from_torch(torch_mesh) is mesh
    with pytest.raises(sw.MeshError, match="to_torch: expected a mesh with mesh_dim_names"):
        sw.DeviceMesh("cpu", [[0, 1], [2, 3]]).to_torch()


def test_a_mesh_goes_to_torch_and_back_over_the_same_groups(workers4: sw.Workers) -> None:
    workers4.run(there_and_back)


# ---- the end of groups


def everything_is_released(store: Path) -> None:
    mesh = square()
    rank = dist.get_rank()
    before = sw.communicator(mesh, "dp")
    assert who_is_there(before) == [rank % 2, rank % 2 + 2]
    groups = [weakref.ref(group) for group in (*mesh.get_all_groups(), dist.group.WORLD)]
    other = weakref.ref(sw.communicator(mesh, "tp"))
    dist.destroy_process_group()
    gc.collect()
    assert [group() for group in groups] == [None] * 3
    assert other() is None
    with pytest.raises(sw.CollectiveError, match=r"group of ranks .* was destroyed; .*ask sw\."):
        before.all_reduce(torch.ones(1))
    with pytest.raises(sw.MeshError, match=r"mesh: expected ranks 0 to 0, .*process is alone"):
        sw.communicator(mesh, "dp")

    start_again(store)
    assert square() is mesh
    after = sw.communicator(mesh, "dp")
    assert after is not before and who_is_there(after) == [rank % 2, rank % 2 + 2]
    total = sw.communicator(mesh).all_reduce(value(rank, (3,), torch.int64))
    check(total, reduced([value(index, (3,), torch.int64) for index in range(4)], "sum"))
    with pytest.raises(sw.CollectiveError, match="was destroyed"):
        before.all_reduce(torch.ones(1))


def test_groups_are_released_with_the_default_group_and_a_mesh_outlives_them(
    fresh4: sw.Workers, tmp_path: Path
) -> None:
    fresh4.run(everything_is_released, tmp_path / "second")


def one_group_is_destroyed() -> None:
    mesh = square()
    for _ in range(2):
        before = sw.communicator(mesh, "dp")
        expected = who_is_there(before)
        dist.destroy_process_group(mesh.get_group("dp"))
        with pytest.raises(sw.CollectiveError, match="was destroyed"):
            before.all_reduce(torch.ones(1))
        after = sw.communicator(mesh, "dp")
        assert after is not before and who_is_there(after) == expected
    assert len(who_is_there(sw.communicator(mesh, "tp"))) == 2


def test_a_group_that_was_destroyed_alone_is_made_again(fresh4: sw.Workers) -> None:
    fresh4.run(one_group_is_destroyed)


def a_group_is_held_after_its_end() -> None:
    mesh = square()
    comm, group = sw.communicator(mesh, "dp"), mesh.get_group("dp")
    comm.barrier()
    dist.destroy_process_group()
    assert isinstance(group, dist.ProcessGroup)
    with pytest.raises(sw.CollectiveError, match="was destroyed"):
        comm.all_reduce(torch.ones(1))


def test_a_destroyed_group_that_somebody_holds_is_not_used(fresh4: sw.Workers) -> None:
    fresh4.run(a_group_is_held_after_its_end)


# ---- errors


def a_peer_leaves() -> None:
    comm = sw.communicator(square(), "dp")
    comm.barrier()
    if comm.index == 1:
        dist.destroy_process_group()
        return
    with pytest.raises(sw.CollectiveError, match=r"all_reduce over dp of ranks \(\d, \d\) failed"):
        comm.all_reduce(torch.ones(1))


def test_a_collective_whose_peer_is_gone_says_which_it_was(fresh4: sw.Workers) -> None:
    fresh4.run(a_peer_leaves)
