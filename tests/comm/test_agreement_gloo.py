"""Real ranks that say different things about one tensor: told by the store, without waiting."""

import pytest
import torch

import shardwise as sw
from shardwise import DTensor, MismatchError, RankError, Shard, sharded


def differing_shapes():
    """Return the error of this rank at each of two collectives, or None."""
    mesh = sw.init_device_mesh("cpu", (4,))
    group = sw.communicator(mesh)
    found = []
    for shape in (2, 3, 2):  # the last time, ranks agree again
        rows = shape if mesh.get_rank() == 3 else 2
        DTensor.from_local(torch.ones(rows, 3), mesh, [Shard(0)], shape=(4 * rows, 3))
        try:
            group.barrier()
            found.append(None)
        except MismatchError as error:
            found.append(str(error))
            group.barrier()  # the others wait in it
    return found


def test_ranks_that_differ_from_the_first_one_raise_before_their_collective(workers4):
    first, second, third = zip(*workers4.run(differing_shapes), strict=True)
    assert first == third == (None,) * 4
    errors = [each for each in second if each is not None]
    assert 1 <= len(errors) <= 3
    assert any("rank 3: DTensor.from_local([12@0, 3])" in each for each in errors)
    assert all("DTensor.from_local([8@0, 3])" in each for each in errors)


def one_rank_alone():
    mesh = sw.init_device_mesh("cpu", (4,))
    for _ in range(3):
        if mesh.get_rank() == 2:
            DTensor.from_local(torch.ones(5), mesh, [Shard(0)], shape=(20,))
        sw.communicator(mesh).barrier()
        x = DTensor.from_local(torch.ones(1), mesh, [Shard(0)], shape=(4,))
        assert x.sum().item() == 4


def test_a_rank_that_states_a_fact_alone_neither_waits_nor_fails(workers4):
    workers4.run(one_rank_alone)


def parts_of_a_mesh():
    """Return the error of this rank, if any, where parts of a mesh differ, and where ranks do."""
    mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    found = []
    for more in (mesh.get_local_rank("dp"), mesh.get_rank()):
        rows = 5 + more
        DTensor.from_local(torch.ones(rows), mesh["tp"], [Shard(0)], shape=(2 * rows,))
        try:
            sw.communicator(mesh).barrier()
            found.append("")
        except MismatchError as error:
            found.append(str(error))
            sw.communicator(mesh).barrier()  # the others wait in it
    return found


def test_only_ranks_of_the_same_part_of_a_mesh_are_compared(workers4):
    parts, single = zip(*workers4.run(parts_of_a_mesh), strict=True)
    assert parts == ("",) * 4
    assert [sum(map(bool, single[:2])), sum(map(bool, single[2:]))] == [1, 1]


def differing_reshard():
    spec = sharded.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    x = sharded.zeros(spec, 4, 4)
    rank = torch.distributed.get_rank()
    x.reshard(sharded.ChunkShardingSpec(1, [f"rank:{rank}/cpu", f"rank:{1 - rank}/cpu"]))


@pytest.mark.slow
def test_a_spec_that_differs_between_real_ranks_ends_the_program():
    with pytest.raises(RankError, match=r"ShardedTensor\.reshard to shards"):
        sw.launch(differing_reshard, 2, timeout=60)
